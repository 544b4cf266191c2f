// The search for few rows: the interface that each instruction set implements.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

// The layout of the rows of a call. They lie one after the other, or in groups with a row in each lane of a
// vector, where no sum across lanes is needed. The padding is zero.
struct FewLayout {
  FewLayout(int64_t lanes, int64_t count, int64_t d)
      : grouped(count * (d + kSumAcross) >= lanes * d),
        lanes(lanes),
        row_pitch((d + lanes - 1) / lanes * lanes),
        group_pitch(d * lanes),
        score_pitch(grouped ? (count + lanes - 1) / lanes * lanes : 1) {
    while (score_pitch < count) score_pitch *= 2;
  }

  // Return the first element of a row, and the number of floats from one element to the next.
  int64_t start(int64_t row) const {
    return grouped ? row / lanes * group_pitch + row % lanes : row * row_pitch;
  }
  int64_t step() const { return grouped ? lanes : 1; }
  // Return the number of floats of all rows, and of the scores of k codewords.
  int64_t size(int64_t count) const {
    return grouped ? score_pitch / lanes * group_pitch : count * row_pitch;
  }
  int64_t scores(int64_t k) const { return (k * score_pitch + lanes - 1) / lanes * lanes; }

  static constexpr int64_t kSumAcross = 28;  // elements that take as long as a sum across lanes
  bool grouped;
  int64_t lanes, row_pitch, group_pitch;
  int64_t score_pitch;  // scores of a codeword: a multiple of the lanes, or a power of two that divides them
};

// The scores of a call. Products need half the operations of differences if the CPU adds and multiplies in
// the same units, but their error grows with |x| |c| and not with the distance.
enum class FewForm { differences, products, cosine };

struct FewRun {
  FewLayout layout;
  const float* rows;
  int64_t count;
  const void* codewords;  // [k, d], contiguous
  Dtype dtype;            // of the codewords, not f64
  int64_t k, d;
  FewForm form;
  float* scores;  // [k, score_pitch], padded with infinity
};

constexpr int64_t kNoCode = -1, kSeveralCodes = -2;

struct VqAssignFewKernel {
  int64_t lanes;
  // Writes the scores of codewords [lo, hi) with all rows. `unit` is (d + 8) 2^-23.
  // - differences: |x - c|^2, with a relative error below `unit`
  // - products, only for rows in groups: |c|^2 / 2 - <x, c>, with an error below unit (|x| |c| + |c|^2 / 2)
  // - cosine: -<x, c> / |c|, with an error below unit |x|, and NaN if |c|^2 is outside [2^-100, 2^100]
  // Infinity and NaN give NaN. Underflow adds an error of d 2^-120, times 1 + |x| + |c| for products, or of
  // d 2^-70 for cosine.
  void (*score)(const FewRun& run, int64_t lo, int64_t hi);
  // Writes |x|^2 of rows in groups, with a relative error below `unit` and an underflow of d 2^-120.
  void (*squares)(const FewRun& run, float* squares);
  // Writes the least score of each row, without NaN.
  void (*least)(const FewRun& run, float* least);
  // Writes for each row the codeword whose score is at most the limit or NaN, or a mark if there are several.
  // Returns the number of all such codewords of all rows.
  int64_t (*pick)(const FewRun& run, const float* limits, int64_t* codes);
};

extern const VqAssignFewKernel vq_assign_few_portable, vq_assign_few_avx2, vq_assign_few_avx512;

}  // namespace uefl::cpu
