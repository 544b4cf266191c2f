// A prefilter over all codewords in half the bits, for long codewords. For each row, it lists the codewords
// that its error bound does not exclude. Usually there is one. A few are scored again in float32
// (score_candidates). Rows with many go to the kernels of vq_assign_kernel.h.
#pragma once

#include <cstdint>

#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {

// The codewords with a score of at most best + margin, in ascending order, for each row of a tile.
struct CandidateLists {
  static constexpr int kRows = 192, kMost = 16;
  float margin[kRows];  // input; NaN lists nothing, while infinity would list infinite scores
  float best[kRows];
  int count[kRows];  // kMost + 1: too many to list
  int code[kRows][kMost];
  float score[kRows][kMost];
};

struct PrefilterKernel {
  Arithmetic arithmetic;
  int rows, block_codewords;
  int64_t (*tile_bytes)(int64_t count, int64_t d);
  int64_t (*block_bytes)(int64_t d);
  int64_t scratch_bytes;  // bytes of workspace for candidates()
  // As in VqAssignKernel. `unit` is the unit of fixed-point codebooks (code_unit).
  double (*pack)(const float* code, int64_t d, float unit, int64_t lane, void* block);
  void (*load)(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y,
               RowSize* size);
  void (*candidates)(const void* y, int64_t count, const void* panels, const float* half_squares,
                     int64_t blocks, int64_t d, float unit, Ahead ahead, void* scratch, CandidateLists& out);
  // Writes the float32 scores of `count` codewords with one row. `codewords` are centered, centered_pitch(d)
  // apart, and padded with zeros. `y` is workspace for a row.
  void (*score_candidates)(const char* source, Dtype dtype, int64_t d, const float* mean,
                           const float* codewords, const float* half_squares, const int* code, int count,
                           float* y, float* score);
};

extern const PrefilterKernel vq_prefilter_portable, vq_prefilter_avx2, vq_prefilter_avx512vnni,
    vq_prefilter_amx;

namespace {

inline int64_t centered_pitch(int64_t d) { return (d + 15) / 16 * 16; }

// Returns the unit of 16-bit numbers for a vector. The length of the vector is at most 46,000 units. So a
// product of two vectors stays below 2^31, although each element is 0.5 units off in up to 2^16 elements. Its
// largest element is at most 32,767 units. The unit is at least 2^-40, so that products of units are normal
// floats.
inline float fixed_unit(float norm, float largest) {
  const float by_norm = norm * (1 / 46000.0f), by_element = largest * (1 / 32767.0f);
  const float unit = (by_norm > by_element ? by_norm : by_element) * (1 + 0x1p-20f);
  return unit < 0x1p-40f ? 0x1p-40f : unit;
}

}  // namespace
}  // namespace uefl::cpu
