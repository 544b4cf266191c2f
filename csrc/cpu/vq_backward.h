// The gradient of vq with respect to x, in one pass that reads x and the gradient of `quantized` and writes
// the result:
//
//   grad = scale g + pull (x - q) + along x + towards q
//
// Straight through, scale is 1 and the last two terms are absent; the rotation trick makes three numbers per
// segment of dot products (csrc/common/rotation.h). Codewords are gathered again from the indices: nothing
// else is kept of the forward pass.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

struct VqBackward {
  StridedRows x, grad_quantized;  // of one dtype; the data of grad_quantized are null where there is none
  StridedRows grad_x;             // likewise; its data are written
  bool wide;  // codewords, and what is not rotated, are in float64, not in float32; what is rotated always is
  bool rotation;
  int64_t d, codebook_step;  // as in VqRun
  const int64_t* indices;    // [N, S]
  const void* codes;         // [.., k, d]
  double pull;
};

// Rows [lo, hi). Safe to call from several threads.
void vq_backward(const VqBackward& run, int64_t lo, int64_t hi);

}  // namespace uefl::cpu
