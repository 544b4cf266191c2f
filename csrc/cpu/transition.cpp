#include "cpu/transition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/softmax.h"

namespace uefl::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns the log of the sum over k of exp(z_k + log_weight_k), by the definition.
template <class T>
double log_sum_exp(const std::vector<double>& z, const T* log_weight) {
  double most = -kInfinity, total = 0;
  for (size_t k = 0; k < z.size(); ++k) most = std::max(most, z[k] + log_weight[k]);
  if (most == -kInfinity) return most;
  for (size_t k = 0; k < z.size(); ++k) total += std::exp(z[k] + log_weight[k] - most);
  return most + std::log(total);
}

// Computes to_k += weight * softmax_k(z + log_weight).
template <class T>
void add_softmax(double weight, const std::vector<double>& z, const T* log_weight, double log_total,
                 std::vector<double>& to) {
  for (size_t k = 0; k < z.size(); ++k) to[k] += weight * std::exp(z[k] + log_weight[k] - log_total);
}

template <class T>
bool is_empty(const T* log_weight, int64_t k) {
  return std::all_of(log_weight, log_weight + k, [](T value) { return value == -kInfinity; });
}

// Returns true if a row looks like class proportions instead of their logarithms: nothing is below 0, and the
// sum is 1, with room for half precision. Logarithms of priors never do (the set would have to be certain for
// every class), and logarithms of counts do not either. Logarithms of other weights (1 to e) may. With one
// class it does not matter, because a constant changes nothing.
template <class T>
bool is_shares(const T* row, int64_t k) {
  if (k == 1) return false;
  double total = 0;
  for (int64_t j = 0; j < k; ++j) {
    if (!(row[j] >= 0)) return false;
    total += row[j];
  }
  return std::fabs(total - 1) <= 0.01;
}

// Calls body with a null pointer of the type of the matrix.
template <class Body>
void with_precision(Dtype logits, const Body& body) {
  return logits == Dtype::f64 ? body(static_cast<const double*>(nullptr))
                              : body(static_cast<const float*>(nullptr));
}

std::string at(const char* name, int64_t n, int64_t value) {
  return std::string(": ") + name + "[" + std::to_string(n) + "] is " + std::to_string(value);
}

}  // namespace

Transition::Transition(const char* op, const StridedRows& logits, const int64_t* targets,
                       const int64_t* groups, const LogTransition& log, int64_t ignore_index)
    : op_(op),
      logits_(logits),
      targets_(targets),
      groups_(groups),
      log_(log),
      ignore_index_(ignore_index),
      rows_(logits.outer * logits.inner),
      block_rows_(std::max<int64_t>(16, (int64_t{1} << 14) / log.k)),
      padded_m_(padded(log.m)),
      padded_k_(padded(log.k)) {
  with_precision(logits.dtype, [&]<class T>(const T*) {
    for (int64_t g = 0; g < log.g; ++g) {
      const T* marginal = static_cast<const T*>(log.marginal) + g * log.k;
      const std::string name = op_ + std::string(": log_transition of group ") + std::to_string(g);
      for (int64_t k = 0; k < log.k; ++k) {
        if (marginal[k] < kInfinity) continue;
        throw std::runtime_error(name + " holds NaN or +inf for class " + std::to_string(k) +
                                 "; expected logarithms of priors, -inf for 0");
      }
      if (is_empty(marginal, log.k))
        throw std::runtime_error(name +
                                 " is -inf for every class; at least one class needs a positive prior");
    }
  });
  require_groups();
  // A matrix with more sets than rows in the batch costs only the rows that are used.
  const std::vector<bool> used = targets ? require_targets() : std::vector<bool>(log.g * log.m, true);
  for (int64_t set = 0; !targets && set < log.g * log.m; ++set) require_logarithms(set);
  if (logits.dtype != Dtype::f64) linearize(used);
}

void Transition::require_groups() const {
  for (int64_t n = 0; groups_ && n < rows_; ++n) {
    if (groups_[n] >= 0 && groups_[n] < log_.g) continue;
    throw std::runtime_error(op_ + at("groups", n, groups_[n]) + ", expected 0 to " +
                             std::to_string(log_.g - 1) + ", the groups of log_transition");
  }
}

std::vector<bool> Transition::require_targets() const {
  std::vector<bool> used(log_.g * log_.m);
  for (int64_t n = 0; n < rows_; ++n) {
    if (targets_[n] == ignore_index_) continue;
    if (targets_[n] < 0 || targets_[n] >= log_.m) {
      throw std::runtime_error(op_ + at("targets", n, targets_[n]) + ", expected the index of a set, 0 to " +
                               std::to_string(log_.m - 1));
    }
    const int64_t set = group(n) * log_.m + targets_[n];
    if (used[set]) continue;
    used[set] = true;
    require_logarithms(set);
    with_precision(logits_.dtype, [&]<class T>(const T*) {
      if (!is_empty(static_cast<const T*>(log_.matrix) + set * log_.k, log_.k)) return;
      throw std::runtime_error(
          op_ + at("targets", n, targets_[n]) + ", but log_transition of group " + std::to_string(group(n)) +
          " is -inf for every class of this set; a set with samples needs a class with a "
          "positive prior");
    });
  }
  return used;
}

void Transition::require_logarithms(int64_t set) const {
  with_precision(logits_.dtype, [&]<class T>(const T*) {
    if (!is_shares(static_cast<const T*>(log_.matrix) + set * log_.k, log_.k)) return;
    throw std::runtime_error(op_ + std::string(": log_transition of group ") + std::to_string(set / log_.m) +
                             " has shares that sum to 1 for set " + std::to_string(set % log_.m) +
                             ", expected their logarithms; use log_transition_matrix");
  });
}

void Transition::linearize(const std::vector<bool>& used) {
  const int64_t k = log_.k;
  matrix_.resize(log_.g * log_.m * padded_k_);
  marginal_.resize(log_.g * padded_k_);
  matrix_scale_.assign(log_.g * padded_m_, -std::numeric_limits<float>::infinity());
  marginal_scale_.resize(log_.g);
  const auto exponentials = [k](const float* from, float* to) {
    const float scale = *std::max_element(from, from + k);
    for (int64_t j = 0; j < k; ++j) to[j] = scale == -kInfinity ? 1 : std::exp(from[j] - scale);
    return scale;
  };
  for (int64_t g = 0; g < log_.g; ++g) {
    marginal_scale_[g] =
        exponentials(static_cast<const float*>(log_.marginal) + g * k, &marginal_[g * padded_k_]);
    for (int64_t m = 0; m < log_.m; ++m) {
      const int64_t set = g * log_.m + m;
      if (!used[set]) continue;
      matrix_scale_[g * padded_m_ + m] =
          exponentials(static_cast<const float*>(log_.matrix) + set * k, &matrix_[set * padded_k_]);
    }
  }
  if (targets_) return;
  transposed_.assign(log_.g * k * padded_m_, 1);
  for (int64_t set = 0; set < log_.g * log_.m; ++set) {
    float* column = &transposed_[set / log_.m * k * padded_m_ + set % log_.m];
    for (int64_t j = 0; j < k; ++j) column[j * padded_m_] = matrix_[set * padded_k_ + j];
  }
}

// Runs the kernel on blocks [lo, hi), and the definition on its pending rows: define(n, z, matrix, marginal),
// with z in float64 and the logarithms of the group of row n.
template <class Kernel, class Define>
void Transition::each_row(int64_t lo, int64_t hi, TransitionRun run, const Kernel& kernel,
                          const Define& define) const {
  const int64_t first = std::min(rows_, lo * block_rows_), last = std::min(rows_, hi * block_rows_);
  std::vector<int64_t> pending(last - first);
  int64_t count = last - first;
  if (logits_.dtype == Dtype::f64) {
    for (int64_t i = 0; i < count; ++i) pending[i] = first + i;
  } else {
    std::vector<float> scratch(kTile * (2 * padded_k_ + padded_m_));
    run.logits = logits_, run.lo = first, run.hi = last;
    run.targets = targets_, run.groups = groups_, run.ignore_index = ignore_index_;
    run.m = log_.m, run.padded_m = padded_m_;
    run.matrix = matrix_.data(), run.transposed = transposed_.data(), run.marginal = marginal_.data();
    run.matrix_scale = matrix_scale_.data(), run.marginal_scale = marginal_scale_.data();
    run.row = scratch.data(), run.mix = run.row + kTile * padded_k_, run.sets = run.mix + kTile * padded_k_;
    run.pending = pending.data();
    count = kernel(run);
  }
  with_precision(logits_.dtype, [&]<class T>(const T*) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = pending[i], g = group(n);
      define(n, read_row(logits_, n), static_cast<const T*>(log_.matrix) + g * log_.m * log_.k,
             static_cast<const T*>(log_.marginal) + g * log_.k);
    }
  });
}

void Transition::nll(int64_t lo, int64_t hi, void* loss, void* gradient) const {
  TransitionRun run{};
  run.out = static_cast<float*>(loss), run.gradient = static_cast<char*>(gradient);
  each_row(lo, hi, run, softmax_kernel().nll,
           [&]<class T>(int64_t n, const std::vector<double>& z, const T* matrix, const T* marginal) {
             std::vector<double> slope(z.size());
             double value = 0;
             if (targets_[n] != ignore_index_) {
               const T* target = matrix + targets_[n] * log_.k;
               const double all = log_sum_exp(z, marginal), own = log_sum_exp(z, target);
               value = all - own;
               add_softmax(1, z, marginal, all, slope);
               add_softmax(-1, z, target, own, slope);
             }
             static_cast<T*>(loss)[n] = static_cast<T>(value);
             if (gradient) write_row(slope, logits_.dtype, gradient, n);
           });
}

void Transition::probs(int64_t lo, int64_t hi, void* log_g) const {
  TransitionRun run{};
  run.out = static_cast<float*>(log_g);
  each_row(lo, hi, run, softmax_kernel().probs,
           [&]<class T>(int64_t n, const std::vector<double>& z, const T* matrix, const T* marginal) {
             const double all = log_sum_exp(z, marginal);
             T* out = static_cast<T*>(log_g) + n * log_.m;
             for (int64_t m = 0; m < log_.m; ++m)
               out[m] = static_cast<T>(log_sum_exp(z, matrix + m * log_.k) - all);
           });
}

void Transition::probs_backward(int64_t lo, int64_t hi, const void* grad, void* gradient) const {
  TransitionRun run{};
  run.grad = static_cast<const float*>(grad), run.gradient = static_cast<char*>(gradient);
  const auto define = [&]<class T>(int64_t n, const std::vector<double>& z, const T* matrix,
                                   const T* marginal) {
    const T* weight = static_cast<const T*>(grad) + n * log_.m;
    std::vector<double> slope(z.size());
    double total = 0;
    for (int64_t m = 0; m < log_.m; ++m) {
      const T* set = matrix + m * log_.k;
      if (is_empty(set, log_.k)) continue;
      add_softmax(static_cast<double>(weight[m]), z, set, log_sum_exp(z, set), slope);
      total += weight[m];
    }
    add_softmax(-total, z, marginal, log_sum_exp(z, marginal), slope);
    write_row(slope, logits_.dtype, gradient, n);
  };
  each_row(lo, hi, run, softmax_kernel().probs_backward, define);
}

}  // namespace uefl::cpu
