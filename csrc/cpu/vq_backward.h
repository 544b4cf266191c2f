// The gradient of vq with respect to x, in one pass that reads x and the gradient of `quantized` and writes
// the result:
//
//   grad = scale g + pull (x - q) + along x + towards q
//
// For the straight-through estimator, scale is 1 and the last two terms are absent. The rotation trick
// computes three factors per segment from dot products (csrc/common/rotation.h). Codewords are gathered again
// from the indices: the forward pass stores nothing else.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

struct VqBackward {
  StridedRows x, grad_quantized;  // of one dtype; null data in grad_quantized: no gradient
  StridedRows grad_x;             // output, of the same dtype
  bool wide;  // codewords, and arithmetic without rotation, are in float64, else in float32; rotation is
              // always in float64
  bool rotation;
  int64_t d, codebook_step;  // as in VqRun
  const int64_t* indices;    // [N, S]
  const void* codewords;     // [.., k, d]
  double pull;
};

// Rows [lo, hi). Thread-safe.
void vq_backward(const VqBackward& run, int64_t lo, int64_t hi);

}  // namespace uefl::cpu
