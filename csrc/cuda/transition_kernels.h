// The transition ops and set_proportion_loss on CUDA, in log space like their definitions.
//
// A warp works on a row or on a set. Its lanes stride over the classes and combine their results by shuffles.
// The kernels compute in float32, or in float64 for float64 logits. They first subtract the largest logit, so
// that large logits lose no digits. A group or a target out of range reads nothing and gives NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/rows.h"

namespace uefl::cuda {
namespace transition {
namespace {

constexpr int kThreads = 128;

// The type of the computation, for a type of logits.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
struct TransitionProblem {
  const T* logits;  // [b, k]
  int64_t b, k, stride_b, stride_k;
  const Wide<T>*matrix, *marginal;  // [g, m, k], [g, k]
  const int64_t* groups;            // [b], or null: all 0
  int64_t g, m;
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// Returns the larger number. NaN counts as the largest.
template <class W>
__device__ W larger(W a, W b) {
  return a > b || a != a ? a : b;
}

template <class W>
__device__ W warp_max(W value) {
  for (int step = kWarp / 2; step > 0; step /= 2)
    value = larger(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Returns the largest logit of a row among those with finite weights. Returns NaN if a logit is NaN or +inf,
// and 0 if all are -inf.
template <class T>
__device__ Wide<T> largest(const T* z, const Wide<T>* weights, int64_t k, int64_t stride, int lane) {
  using W = Wide<T>;
  W most = -W(INFINITY);
  for (int64_t j = lane; j < k; j += kWarp) {
    const W value = widen(z[j * stride]);
    if (!(value < W(INFINITY))) most = W(NAN);
    if (weights[j] > -W(INFINITY)) most = larger(value, most);
  }
  most = warp_max(most);
  return most == -W(INFINITY) ? W(0) : most;
}

// Returns the log of the sum over j < k of exp(term(j)). Returns -inf if all terms are -inf, and NaN if one
// is NaN or +inf.
template <class W, class Term>
__device__ W log_sum_exp(int64_t k, int lane, const Term& term) {
  W most = -W(INFINITY), total = 0;
  for (int64_t j = lane; j < k; j += kWarp) most = larger(term(j), most);
  most = warp_max(most);
  if (most == -W(INFINITY)) return most;
  for (int64_t j = lane; j < k; j += kWarp) total += exponential(term(j) - most);
  return most + logarithm(warp_sum(total));
}

__device__ inline int64_t first_warp() { return (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp; }
__device__ inline int64_t warps() { return gridDim.x * int64_t{blockDim.x} / kWarp; }

// A row of logits, as a warp reads it, with the weights of its group.
template <class T>
struct LogitRow {
  using W = Wide<T>;
  const T* z;
  int64_t k, stride;
  bool inside;                 // the group is in range; otherwise the weights are of group 0
  const W *marginal, *matrix;  // [k], [m, k]
  W off, every;                // the logit that is subtracted, and the log of the sum over the marginal

  __device__ LogitRow(const TransitionProblem<T>& problem, int64_t n, int lane)
      : z(problem.logits + n * problem.stride_b), k(problem.k), stride(problem.stride_k) {
    const int64_t group = problem.groups ? problem.groups[n] : 0;
    inside = group >= 0 && group < problem.g;
    marginal = problem.marginal + (inside ? group : 0) * k;
    matrix = problem.matrix + (inside ? group : 0) * problem.m * k;
    off = largest(z, marginal, k, stride, lane);
    every = inside ? sum(marginal, lane) : W(NAN);
  }
  __device__ W shifted(int64_t j) const { return W(widen(z[j * stride])) - off; }
  // Returns the log of the sum over j of exp(shifted(j) + weights[j]).
  __device__ W sum(const W* weights, int lane) const {
    return log_sum_exp<W>(k, lane, [&](int64_t j) { return shifted(j) + weights[j]; });
  }
};

// Computes loss [b], and gradient [b, k] unless it is null.
template <class T>
__global__ void nll(TransitionProblem<T> problem, const int64_t* targets, int64_t ignore_index, Wide<T>* loss,
                    T* gradient) {
  using W = Wide<T>;
  const int lane = threadIdx.x % kWarp;
  for (int64_t n = first_warp(); n < problem.b; n += warps()) {
    const LogitRow<T> row(problem, n, lane);
    const int64_t target = targets[n];
    const bool ignored = target == ignore_index, inside = target >= 0 && target < problem.m && row.inside;
    const W* weights = row.matrix + (inside ? target : 0) * row.k;
    const W own = inside ? row.sum(weights, lane) : W(NAN), value = ignored ? W(0) : row.every - own;
    if (lane == 0) loss[n] = value;
    for (int64_t j = lane; gradient && j < row.k; j += kWarp) {
      W slope = ignored ? W(0) : W(NAN);
      if (!ignored && value < W(INFINITY)) {
        const W shifted = row.shifted(j);
        slope = exponential(shifted + row.marginal[j] - row.every) - exponential(shifted + weights[j] - own);
      }
      narrow(slope, gradient[n * row.k + j]);
    }
  }
}

// Computes log_g [b, m].
template <class T>
__global__ void probs(TransitionProblem<T> problem, Wide<T>* log_g) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t n = first_warp(); n < problem.b; n += warps()) {
    const LogitRow<T> row(problem, n, lane);
    for (int64_t m = 0; m < problem.m; ++m) {
      const Wide<T> own = row.sum(row.matrix + m * row.k, lane);
      if (lane == 0) log_g[n * problem.m + m] = own - row.every;
    }
  }
}

// Computes gradient [b, k] from grad and log_g [b, m]. A lane has the classes lane, lane + 32, ... and adds
// up the sets for each.
template <class T>
__global__ void probs_backward(TransitionProblem<T> problem, const Wide<T>* grad, const Wide<T>* log_g,
                               T* gradient) {
  using W = Wide<T>;
  const int lane = threadIdx.x % kWarp;
  for (int64_t n = first_warp(); n < problem.b; n += warps()) {
    const LogitRow<T> row(problem, n, lane);
    for (int64_t j = lane; j < row.k; j += kWarp) {
      const W shifted = row.shifted(j);
      W slope = 0, counted = 0;
      for (int64_t m = 0; m < problem.m; ++m) {
        const W own = log_g[n * problem.m + m] + row.every, weight = grad[n * problem.m + m];
        if (own == -W(INFINITY)) continue;  // this set has no share
        slope += weight * exponential(shifted + row.matrix[m * row.k + j] - own);
        counted += weight;
      }
      narrow(slope - counted * exponential(shifted + row.marginal[j] - row.every), gradient[n * row.k + j]);
    }
  }
}

template <class T>
struct SetProblem {
  const T* logits;  // [n, k]
  int64_t n, k, stride_n, stride_k;
  const int64_t* offsets;      // [sets + 1]
  const Wide<T>* proportions;  // [sets, k]
  int64_t sets;
  Wide<T>*row_total, *class_total;  // [n] and [sets, k], workspace
};

// Reads the range of a set. Invalid offsets are clamped to the rows, so that nothing outside is read.
template <class T>
__device__ void range(const SetProblem<T>& problem, int64_t s, int64_t& begin, int64_t& end) {
  begin = problem.offsets[s], end = problem.offsets[s + 1];
  begin = begin < 0 ? 0 : begin > problem.n ? problem.n : begin;
  end = end < begin ? begin : end > problem.n ? problem.n : end;
}

// Computes row_total[n], the log of the sum over k of exp(z_nk), with one warp for each row.
template <class T>
__global__ void row_totals(SetProblem<T> problem) {
  using W = Wide<T>;
  const int lane = threadIdx.x % kWarp;
  for (int64_t n = first_warp(); n < problem.n; n += warps()) {
    const T* z = problem.logits + n * problem.stride_n;
    const W total =
        log_sum_exp<W>(problem.k, lane, [&](int64_t j) { return W(widen(z[j * problem.stride_k])); });
    if (lane == 0) problem.row_total[n] = total;
  }
}

// Computes class_total[s, k], the log of the sum of p_nk over the rows of set s, with one warp for each class
// of a set. It is NaN for a set without rows.
template <class T>
__global__ void class_totals(SetProblem<T> problem) {
  using W = Wide<T>;
  const int lane = threadIdx.x % kWarp;
  for (int64_t i = first_warp(); i < problem.sets * problem.k; i += warps()) {
    int64_t begin, end;
    range(problem, i / problem.k, begin, end);
    const T* z = problem.logits + i % problem.k * problem.stride_k;
    const W total = log_sum_exp<W>(end - begin, lane, [&](int64_t n) {
      return W(widen(z[(begin + n) * problem.stride_n])) - problem.row_total[begin + n];
    });
    if (lane == 0) problem.class_total[i] = begin == end ? W(NAN) : total;
  }
}

// Computes loss [sets], with one warp for each set, and gradient [n, k] unless it is null, with one warp for
// each row. The caller has zeroed the gradient.
template <class T>
__global__ void proportion(SetProblem<T> problem, Wide<T>* loss, T* gradient) {
  using W = Wide<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t k = problem.k;
  for (int64_t s = blockIdx.x; s < problem.sets; s += gridDim.x) {
    int64_t begin, end;
    range(problem, s, begin, end);
    const W *share = problem.proportions + s * k, *total = problem.class_total + s * k;
    const int64_t warp = threadIdx.x / kWarp;
    if (warp == 0) {
      W value = 0;
      for (int64_t j = lane; j < k; j += kWarp) {
        if (share[j] != 0 || total[j] != total[j]) value -= share[j] * (total[j] - logarithm(W(end - begin)));
      }
      value = warp_sum(value);
      if (lane == 0) loss[s] = value;
    }
    for (int64_t n = begin + warp; gradient && n < end; n += blockDim.x / kWarp) {
      const T* z = problem.logits + n * problem.stride_n;
      const W row = problem.row_total[n];
      W pull = 0;
      for (int64_t j = lane; j < k; j += kWarp) {
        if (share[j] != 0) pull += share[j] * exponential(W(widen(z[j * problem.stride_k])) - row - total[j]);
      }
      pull = warp_sum(pull);
      for (int64_t j = lane; j < k; j += kWarp) {
        const W log_p = W(widen(z[j * problem.stride_k])) - row;
        const W own = share[j] != 0 ? share[j] * exponential(log_p - total[j]) : W(0);
        narrow(exponential(log_p) * pull - own, gradient[n * k + j]);
      }
    }
  }
}

}  // namespace
}  // namespace transition
}  // namespace uefl::cuda
