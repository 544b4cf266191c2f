// The transition ops on the CPU: the set that a sample comes from, given logits of its class.
//
// With e_k = exp(z_k - max z), A = exp(matrix) and s = exp(marginal), all of them are ratios of dot products
// with e:
//   nll             loss = log(e.s) - log(e.A_y),   gradient_k = e_k (s_k / e.s - A_yk / e.A_y)
//   probs           log g_m = log(e.A_m) - log(e.s)
//   probs_backward  gradient_k = e_k (sum_m G_m A_mk / e.A_m - sum_m G_m s_k / e.s)
// So each element of the logits takes one exponential, and each element of the matrix takes one per call. The
// rows of A are divided by their largest element, so a product underflows only if the dot product is tiny. In
// that case, for float64, and if a row is not finite, the definition is evaluated: log-sum-exps in float64.
// Rows are independent, so results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

struct TransitionRun;

// Contiguous logarithms, matrix [g, m, k] and marginal [g, k]. They are double for double logits, otherwise
// float.
struct LogTransition {
  const void *matrix, *marginal;
  int64_t g, m, k;
};

// The op prepared for one call. All pointers must outlive it. Blocks of rows may run in parallel.
class Transition {
 public:
  // `targets` are for nll, otherwise null. `groups` are null if g = 1. Throws std::runtime_error with the
  // name of the op if the marginal has NaN or +inf, a group has no class, a group or a target is out of
  // range, the row of a target is all -inf, or a row holds proportions.
  Transition(const char* op, const StridedRows& logits, const int64_t* targets, const int64_t* groups,
             const LogTransition& log, int64_t ignore_index = 0);

  int64_t blocks() const { return (rows_ + block_rows_ - 1) / block_rows_; }

  // Compute blocks [lo, hi). loss [B], log_g and grad [B, m] are double for double logits, otherwise float.
  // gradient [B, k] has the dtype of the logits.
  void nll(int64_t lo, int64_t hi, void* loss, void* gradient) const;  // gradient may be null
  void probs(int64_t lo, int64_t hi, void* log_g) const;
  void probs_backward(int64_t lo, int64_t hi, const void* grad, void* gradient) const;

 private:
  void require_groups() const;
  std::vector<bool> require_targets() const;
  void require_logarithms(int64_t set) const;
  void linearize(const std::vector<bool>& used);
  template <class Kernel, class Define>
  void each_row(int64_t lo, int64_t hi, TransitionRun run, const Kernel& kernel, const Define& define) const;

  int64_t group(int64_t n) const { return groups_ ? groups_[n] : 0; }

  const char* const op_;
  const StridedRows logits_;
  const int64_t *const targets_, *const groups_;
  const LogTransition log_;
  const int64_t ignore_index_, rows_, block_rows_, padded_m_, padded_k_;

  // The float32 tables. Rows without a target are left out. A row of -inf has scale -inf and ones.
  std::vector<float> matrix_;      // [g, m, padded k]: exp(log - scale), zero in the padding
  std::vector<float> transposed_;  // [g, k, padded m]: the same for probs, ones in the padding
  std::vector<float> marginal_;    // [g, padded k]
  std::vector<float> matrix_scale_, marginal_scale_;  // [g, padded m], [g]: the largest logarithm of each row
};

}  // namespace uefl::cpu
