// Exponentials of a row in float32, and the ops made of them, on one run of rows.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

constexpr int64_t kPad =
    16;  // rows of tables are filled up with zeros to a multiple of this, the widest vector
constexpr int64_t kTile = 4;  // rows that share what they read of the matrix
constexpr int64_t kTerms =
    64;  // terms of a sum that are added to one another before they are added to the rest

namespace {
inline int64_t padded(int64_t count) { return (count + kPad - 1) / kPad * kPad; }
}  // namespace

// Below this a dot product of exponentials may have lost terms to underflow: its row is left to the
// definition.
constexpr float kSmallest = 0x1p-60f;

struct TransitionRun {
  StridedRows logits;
  int64_t lo, hi;
  const int64_t *targets, *groups;  // groups may be null
  int64_t ignore_index, m, padded_m;
  const float *matrix, *transposed, *marginal, *matrix_scale, *marginal_scale;  // of LinearTransition
  float* out;               // loss [B] of nll, log g [B, m] of probs
  const float* grad;        // [B, m] of probs_backward
  char* gradient;           // [B, k]; null: nll without one
  float *row, *sets, *mix;  // kTile x [padded k], [padded m], [padded k], scratch
  int64_t* pending;         // [hi - lo]: the rows left to the definition
};

struct ProportionRun {
  StridedRows logits;
  int64_t lo, hi;            // the rows of one set
  const float* proportions;  // [k]
  float *row, *pull;         // [padded k], scratch
  float* sums;               // [padded k]: the sum of the probabilities, comes out
  char* gradient;            // [N, k], or null
};

struct SoftmaxKernel {
  // Return how many rows are pending.
  int64_t (*nll)(const TransitionRun& run);
  int64_t (*probs)(const TransitionRun& run);
  int64_t (*probs_backward)(const TransitionRun& run);
  // False: the whole set is left to the definition, nothing of the gradient is written.
  bool (*proportion)(const ProportionRun& run);
};

extern const SoftmaxKernel softmax_portable, softmax_avx2, softmax_avx512;

}  // namespace uefl::cpu
