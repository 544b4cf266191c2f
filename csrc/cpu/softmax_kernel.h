// Exponentials of a row in float32, and the ops that use them, on one run of rows.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

constexpr int64_t kPad = 16;  // rows of tables are padded with zeros to a multiple of this, the widest vector
constexpr int64_t kTile = 4;  // rows that share a read of the matrix
constexpr int64_t kTerms = 64;  // terms that are summed before they are added to the total

namespace {
inline int64_t padded(int64_t count) { return (count + kPad - 1) / kPad * kPad; }
}  // namespace

// The least safe dot product of exponentials. A smaller one may have lost terms to underflow, so the
// definition evaluates its row.
constexpr float kSmallest = 0x1p-60f;

struct TransitionRun {
  StridedRows logits;
  int64_t lo, hi;
  const int64_t *targets, *groups;  // groups may be null
  int64_t ignore_index, m, padded_m;
  const float *matrix, *transposed, *marginal, *matrix_scale, *marginal_scale;  // of Transition
  float* out;               // loss [B] of nll, log g [B, m] of probs
  const float* grad;        // [B, m] of probs_backward
  char* gradient;           // [B, k], or null for nll without gradient
  float *row, *sets, *mix;  // kTile x [padded k], [padded m], [padded k], workspace
  int64_t* pending;         // [hi - lo]: output, the rows that the definition must evaluate
};

struct ProportionRun {
  StridedRows logits;
  int64_t lo, hi;            // the rows of one set
  const float* proportions;  // [k]
  float *row, *pull;         // [padded k], workspace
  float* sums;               // [padded k]: output, the sum of the probabilities
  char* gradient;            // [N, k], or null
};

struct SoftmaxKernel {
  // Return the number of pending rows.
  int64_t (*nll)(const TransitionRun& run);
  int64_t (*probs)(const TransitionRun& run);
  int64_t (*probs_backward)(const TransitionRun& run);
  // Returns false if the definition must evaluate the whole set. The gradient is then unchanged.
  bool (*proportion)(const ProportionRun& run);
};

extern const SoftmaxKernel softmax_portable, softmax_avx2, softmax_avx512;

}  // namespace uefl::cpu
