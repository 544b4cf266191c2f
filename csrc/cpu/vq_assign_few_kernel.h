// The search for few rows: what each instruction set offers.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

struct FewRun {
  const float* rows;  // [count, pitch], filled up with zeros
  int64_t count, pitch;
  const void* codes;  // [k, d], contiguous
  Dtype dtype;        // of the codes, not f64
  int64_t k, d;
  bool euclidean;
  float* scores;  // [count, score_pitch]
  int64_t score_pitch;
};

struct VqAssignFewKernel {
  // Floats from row to row for rows of d elements.
  int64_t (*pitch)(int64_t d);
  // Writes the scores of codewords [lo, hi) with all rows: |x - c|^2, of a relative error below
  // (d + 8) 2^-23; or for cosine -<x, c> / |c|, of an error below (d + 8) 2^-23 |x|, and NaN where |c|^2
  // leaves [2^-100, 2^100]. Infinity and NaN give NaN. Underflow adds an error of d 2^-120, for cosine d
  // 2^-70.
  void (*score)(const FewRun& run, int64_t lo, int64_t hi);
};

extern const VqAssignFewKernel vq_assign_few_portable, vq_assign_few_avx2, vq_assign_few_avx512;

}  // namespace uefl::cpu
