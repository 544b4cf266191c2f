// The end of an iteration of Lloyd's algorithm on CUDA, after the search, in one launch. It updates the sums
// for rows that changed their cluster, gives rows to empty clusters, moves the centers, and tests for the end
// of the fit. The bits are the same as in advance() in ops/kmeans/composed.py.
//
// Sums are integers. So a cluster's sum is its sum in the last iteration, minus the rows that have left the
// cluster, plus the rows that have entered it.
//
// Bytes: two labels for each row, and x of the rows that changed.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/grid.h"
#include "cuda/kmeans_step_kernels.h"
#include "cuda/rows.h"
#include "cuda/sums.h"

namespace uefl::cuda {
namespace {

constexpr int kAdvanceBlocks = 4;  // largest number of thread blocks on a multiprocessor

template <class Center>
struct Lloyd {
  const int64_t *previous, *labels;  // [n]; previous is null if the sums already belong to the labels
  const double *middle, *scale, *weights, *mass_scale;  // [d], [d], [n] or null for 1, [1]
  const double* limit;                                  // [1] squared shift at which the fit ends
  bool spherical;
  Center* centers;                // [k, d]
  long long *masses, *sums;       // [k], [k, d]
  long long *keys, *farthest;     // workspace: [n], [k]
  double* shifts;                 // workspace: [k]
  long long *iterations, *ended;  // [1]

  __device__ double weight(int64_t row) const { return weights ? weights[row] : 1; }
  // Return the amount that a row adds to the mass of its cluster, and that one element of it adds to the sum.
  __device__ long long mass(int64_t row) const { return __double2ll_rn(weight(row) * *mass_scale); }
  __device__ long long term(double value, double weight, int64_t j) const {
    return __double2ll_rn((value - middle[j]) * weight * scale[j]);
  }
};

__device__ inline long long minus(long long value) {  // defined for the smallest number, too
  return static_cast<long long>(0 - static_cast<unsigned long long>(value));
}
// Returns a sum that wraps around, as the sums in memory do.
__device__ inline long long plus(long long a, long long b) {
  return static_cast<long long>(static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b));
}

// Moves rows in the sums if their label has changed. A warp reads the labels of 32 rows at a time. Its lanes
// share the elements of each row that has changed.
template <class T, class Center>
__device__ void follow_changes(const T* x, const Shape& shape, const Lloyd<Center>& fit) {
  const int lane = threadIdx.x % kWarp;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x,
                thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (int64_t first = thread - lane; first < shape.outputs; first += threads) {
    const int64_t row = first + lane;
    int64_t from = 0, to = 0;
    if (row < shape.outputs) from = fit.previous[row], to = fit.labels[row];
    const double weight = from != to ? fit.weight(row) : 0;
    if (from != to) add_to(fit.masses + to, fit.mass(row)), add_to(fit.masses + from, minus(fit.mass(row)));
    for (unsigned changed = __ballot_sync(kAllLanes, from != to); changed != 0; changed &= changed - 1) {
      const int which = __ffs(changed) - 1;
      const T* values = x + (first + which) * shape.inner_stride;
      const double weight_of_row = __shfl_sync(kAllLanes, weight, which);
      long long* entered = fit.sums + __shfl_sync(kAllLanes, to, which) * shape.d;
      long long* left = fit.sums + __shfl_sync(kAllLanes, from, which) * shape.d;
      UEFL_UNROLL_BY(4)
      for (int64_t j = lane; j < shape.d; j += kWarp) {
        const long long term =
            fit.term(static_cast<double>(widen(values[j * shape.stride])), weight_of_row, j);
        add_to(entered + j, term), add_to(left + j, minus(term));
      }
    }
  }
}

// Returns the number of clusters before `end` that have no mass.
__device__ inline int64_t empty_before(int64_t end, const long long* masses) {
  int64_t count = 0;
  for (int64_t cluster = 0; cluster < end; ++cluster) count += masses[cluster] == 0;
  return count;
}
// Counts the clusters without mass among all k. All threads of a thread block call it.
__device__ inline int count_empty(int64_t k, const long long* masses) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int64_t cluster = threadIdx.x; cluster < k; cluster += blockDim.x) {
    if (masses[cluster] == 0) atomicAdd(&count, 1);
  }
  __syncthreads();
  return count;
}

// The key of a row: the bits of its squared distance to its center in float64, plus 1. The number of the row
// replaces the last bits. So no two keys are equal, and of equal distances the first row has the largest key.
// The key is zero for a row without distance or mass.
struct Keys {
  long long spread = 0;  // the bits that hold the number of a row

  __device__ explicit Keys(int64_t rows) {
    while (spread + 1 < rows) spread = 2 * spread + 1;
  }
  __device__ long long key(double distance, int64_t row) const {
    return ((__double_as_longlong(distance) & ~spread) | (spread - row)) + 1;
  }
  __device__ int64_t row(long long key) const { return spread - ((key - 1) & spread); }
};

// Writes the keys of up to `wanted` rows that are farthest from their centers, the farthest first. Returns
// the number of these rows. Each step finds one row: the thread blocks agree on the largest key below the
// last one.
template <class T, class Center>
__device__ int find_farthest(const T* x, const Shape& shape, const Lloyd<Center>& fit, int wanted) {
  const Keys keys(shape.outputs);
  for_each_group(shape.outputs, [&](int64_t row, bool there) {
    const T* values = x + row * shape.inner_stride;
    const Center* center = there ? fit.centers + fit.labels[row] * shape.d : nullptr;
    const double distance = square_norm(there ? shape.d : 0, [&](int64_t j) {
      return __dsub_rn(static_cast<double>(widen(values[j * shape.stride])), static_cast<double>(center[j]));
    });
    if (there && threadIdx.x % kSquareLanes == 0)
      fit.keys[row] = distance > 0 && fit.mass(row) > 0 ? keys.key(distance, row) : 0;
  });
  grid_barrier();
  long long last = LLONG_MAX;
  for (int found = 0; found < wanted; ++found) {
    long long best = 0;
    for (int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; row < shape.outputs;
         row += int64_t{gridDim.x} * blockDim.x) {
      if (fit.keys[row] < last && fit.keys[row] > best) best = fit.keys[row];
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const long long other = __shfl_xor_sync(kAllLanes, best, step);
      best = other > best ? other : best;
    }
    if (threadIdx.x % kWarp == 0 && best > 0) raise_to(fit.farthest + found, best);
    grid_barrier();
    last = __ldcg(fit.farthest + found);
    if (last == 0) return found;
  }
  return wanted;
}

// Moves each center to the mean of its cluster, by eight lanes, and writes the square of the shift. The first
// of the farthest rows leaves its cluster for the first empty one, and so on. A cluster without mass, or
// without a direction where it must have one, keeps its center.
template <class T, class Center>
__device__ void move_centers(const T* x, const Shape& shape, const Lloyd<Center>& fit, int moved) {
  const Keys keys(shape.outputs);
  for_each_group(shape.k, [&](int64_t cluster, bool there) {
    long long mass = there ? fit.masses[cluster] : 0;
    int64_t gained = -1;
    if (there && moved > 0 && mass == 0) {
      const int64_t rank = empty_before(cluster, fit.masses);
      if (rank < moved) gained = keys.row(fit.farthest[rank]);
    }
    const auto for_exchanged = [&](const auto& exchange) {  // true: the cluster gains the row
      if (gained >= 0) exchange(gained, true);
      for (int i = 0; i < moved; ++i) {
        const int64_t row = keys.row(fit.farthest[i]);
        if (fit.labels[row] == cluster) exchange(row, false);
      }
    };
    for_exchanged(
        [&](int64_t row, bool gains) { mass = plus(mass, gains ? fit.mass(row) : minus(fit.mass(row))); });
    const double share = static_cast<double>(mass) / *fit.mass_scale;
    const auto mean = [&](int64_t j) {
      long long sum = fit.sums[cluster * shape.d + j];
      for_exchanged([&](int64_t row, bool gains) {
        const T value = x[row * shape.inner_stride + j * shape.stride];
        const long long term = fit.term(static_cast<double>(widen(value)), fit.weight(row), j);
        sum = plus(sum, gains ? term : minus(term));
      });
      return fit.middle[j] + static_cast<double>(sum) / fit.scale[j] / share;
    };
    double length = 1;
    if (fit.spherical) length = __dsqrt_rn(square_norm(mass > 0 ? shape.d : 0, mean));
    const double shift = square_norm(mass > 0 && length != 0 ? shape.d : 0, [&](int64_t j) {
      Center& center = fit.centers[cluster * shape.d + j];
      const Center before = center;
      center = static_cast<Center>(mean(j) / length);
      return __dsub_rn(static_cast<double>(center), static_cast<double>(before));
    });
    if (there && threadIdx.x % kSquareLanes == 0) fit.shifts[cluster] = shift;
  });
}

// Adds up the shifts of all centers by halves, as tree_sum() does, and tests for the end of the fit. One
// thread block calls it.
template <class Center>
__device__ void end_iteration(int64_t k, const Lloyd<Center>& fit) {
  int64_t half = 1;
  while (2 * half < k) half *= 2;
  for (; half > 0; half /= 2) {
    for (int64_t i = threadIdx.x; i < half && i + half < k; i += blockDim.x)
      fit.shifts[i] = __dadd_rn(fit.shifts[i], fit.shifts[i + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) ++*fit.iterations, *fit.ended = !(*fit.shifts > *fit.limit);  // NaN ends the fit, too
}

// Ends an iteration. The launch is cooperative, with at most kAdvanceBlocks thread blocks on a
// multiprocessor. Once the fit has ended, it changes nothing.
template <class T, class Center>
__global__ void __launch_bounds__(kThreads, kAdvanceBlocks)
    advance(const T* x, const __grid_constant__ Shape shape, const __grid_constant__ Lloyd<Center> fit) {
  if (*fit.ended != 0) return;  // no thread block writes it before the barriers below
  if (fit.previous != nullptr) follow_changes(x, shape, fit);
  for (int64_t i = threadIdx.x; blockIdx.x == 0 && i < shape.k; i += blockDim.x) fit.farthest[i] = 0;
  grid_barrier();
  const int empty = count_empty(shape.k, fit.masses);
  const int moved = empty > 0 ? find_farthest(x, shape, fit, empty) : 0;
  move_centers(x, shape, fit, moved);
  grid_barrier();
  if (blockIdx.x == 0) end_iteration(shape.k, fit);
}

}  // namespace
}  // namespace uefl::cuda
