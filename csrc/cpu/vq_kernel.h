// The steps of vq after the search, on one run of rows, and the gradient: the interface that each instruction
// set implements.
#pragma once

#include <cstdint>

#include "cpu/row_buffer.h"
#include "cpu/strided_rows.h"
#include "cpu/vq_backward.h"

namespace uefl::cpu {

// A run of rows. Pointers to [N, ..] are to its first row, and the elements of a row of x are contiguous.
struct VqRun {
  BufferedRows x;
  int64_t rows, d;
  int64_t codebook_step;   // codewords between the codebooks of two segments: k, or 0 for a shared codebook
  const int64_t* indices;  // [N, S]
  const char* codewords;   // [.., k, d] in the dtype of x
  const double* exact;     // the same, in float64
  char* quantized;         // [N, S * d] in the dtype of x, or null
  int64_t* counts;         // [.., k]
  int64_t* largest;        // [.., k] |x| in float64, as bits
};

struct VqSums {
  BufferedRows x;
  int64_t rows, d, codebook_step;
  const int64_t* indices;
  const double* scales;  // [.., k] units of `fixed` in 1.0; 0 excludes the rows of this codeword
  int64_t* fixed;        // [.., k, d]
};

struct VqBackwardRun {
  BufferedRows x, grad_quantized, grad_x;
  int64_t rows, d, codebook_step;
  const int64_t* indices;
  const void* codewords;  // in float64 if wide, else in float32
  bool wide, rotation;
  double pull;
};

struct VqKernel {
  // Writes quantized, adds to counts and raises largest. Returns the sum of (x - codeword)^2.
  double (*replace)(const VqRun& run);
  // Adds the rows to `fixed`.
  void (*add)(const VqSums& sums);
  // Writes the gradient.
  void (*backward)(const VqBackwardRun& run);
};

extern const VqKernel vq_portable, vq_avx2, vq_avx512;

}  // namespace uefl::cpu
