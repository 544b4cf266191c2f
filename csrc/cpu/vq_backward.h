// The gradient of vq with respect to x. One pass reads x and the gradient of `quantized`, and writes
//
//   grad = scale g + pull (x - q) + along x + towards q
//
// For the straight-through estimator, scale is 1 and the last two terms are absent. For the rotation trick,
// three factors per segment follow from dot products (csrc/common/rotation.h). Codewords are gathered again
// from the indices, so that the forward pass stores nothing else.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

struct VqBackward {
  StridedRows x, grad_quantized;  // of one dtype; null data in grad_quantized means no gradient
  StridedRows grad_x;             // output, of the same dtype
  bool wide;  // codewords and arithmetic are in float64, otherwise in float32; the arithmetic of a rotation
              // is always in float64
  bool rotation;
  int64_t d, codebook_step;  // as in VqRun
  const int64_t* indices;    // [N, S]
  const void* codewords;     // [.., k, d]
  double pull;
};

// Computes the gradient of rows [lo, hi). Thread-safe.
void vq_backward(const VqBackward& run, int64_t lo, int64_t hi);

}  // namespace uefl::cpu
