// The float32 search on one tile of rows. Each vq_assign.<isa>.cpp defines `Simd`, the vectors of its instruction set, and
// includes this body. No standard templates and internal linkage throughout, for the reason given in rows.h.
#pragma once

#include <cstdint>

#include "cpu/rows.h"

namespace uefl::cpu {

// The entry points of one instruction set. A tile holds `rows` rows; a block holds `lanes` codewords.
struct VqAssignKernel {
  int rows, lanes;
  // y = row - mean for the rows that start at source[0 .. rows), and |y|^2 of each. y has room for rows * (d rounded up to 64).
  void (*load)(const char* const* source, Dtype dtype, int64_t stride, int64_t d, const float* mean, float* y, double* square);
  // Best and second-best score of each row over all blocks, and the codeword of the best.
  void (*top_two)(const float* y, const float* panels, const float* half_squares, int64_t blocks, int64_t d, float* best, float* second,
                  int64_t* index);
  // All scores, [rows][blocks * lanes].
  void (*scores)(const float* y, const float* panels, const float* half_squares, int64_t blocks, int64_t d, float* out);
};

extern const VqAssignKernel vq_assign_portable, vq_assign_avx2, vq_assign_avx512;

}  // namespace uefl::cpu

#if defined(UEFL_KERNEL_BODY)

namespace uefl::cpu {
namespace {

using Float = Simd::Float;
using Int = Simd::Int;
constexpr int kRows = Simd::rows, kWidth = Simd::width, kPanels = 2, kLanes = kPanels * kWidth;
constexpr float kInfinity = __builtin_inff();

// y is laid out [ceil(d / 64)][kRows][64]: rows at a distance known to the compiler, so that each is one address away.
constexpr int64_t kChunk = 64;
constexpr int64_t kSquareStep = 16;  // elements that square_rows reads at once: the end of a row is filled up with zeros

template <class T>
inline float centre(T value, float mean) {
  return static_cast<float>(widen(value) - mean);  // in float64 for float64, then rounded once
}

template <class T>
void load_rows(const char* const* source, int64_t stride, int64_t d, const float* mean, float* y) {
  const auto place = [&](int r, int64_t j) -> float& { return y[(j / kChunk * kRows + r) * kChunk + j % kChunk]; };
  if (stride == 1) {
    for (int r = 0; r < kRows; ++r) {
      const T* x = reinterpret_cast<const T*>(source[r]);
      for (int64_t start = 0; start < d; start += kChunk) {
        const int64_t n = d - start < kChunk ? d - start : kChunk;
        float* chunk = &place(r, start);
        for (int64_t j = 0; j < n; ++j) chunk[j] = centre(x[start + j], mean[start + j]);
      }
    }
  } else {  // neighbouring rows share cache lines when dim is not the innermost dimension
    for (int64_t j = 0; j < d; ++j) {
      for (int r = 0; r < kRows; ++r) place(r, j) = centre(reinterpret_cast<const T*>(source[r])[j * stride], mean[j]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = d; j % kSquareStep != 0; ++j) place(r, j) = 0;
  }
}

typedef float Float8 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));

inline __attribute__((always_inline)) void add_squares(const float* values, Double8& sum) {
  Float8 narrow;
  __builtin_memcpy(&narrow, values, sizeof narrow);
  const Double8 wide = __builtin_convertvector(narrow, Double8);
  sum += wide * wide;
}

// In float64, where squares of floats neither overflow nor underflow.
void square_rows(const float* y, int64_t d, double* square) {
  for (int r = 0; r < kRows; ++r) {
    Double8 even = {}, odd = {};  // two sums, so that one addition need not wait for the last
    for (int64_t j = 0; j < d; j += kSquareStep) {
      const float* values = y + (j / kChunk * kRows + r) * kChunk + j % kChunk;
      add_squares(values, even);
      add_squares(values + 8, odd);
    }
    const Double8 sum = even + odd;
    square[r] = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
  }
}

void load(const char* const* source, Dtype dtype, int64_t stride, int64_t d, const float* mean, float* y, double* square) {
  with_type(dtype, [&]<class T>(const T*) { load_rows<T>(source, stride, d, mean, y); });
  square_rows(y, d, square);
}

// Scores of all rows of the tile against each block of codewords in turn, handed to sink(block, scores) in registers.
template <class Sink>
inline __attribute__((always_inline)) void score_blocks(const float* y, const float* panels, const float* half_squares, int64_t blocks,
                                                        int64_t d, const Sink& sink) {
  for (int64_t block = 0; block < blocks; ++block) {
    const Float* codes = reinterpret_cast<const Float*>(panels + block * d * kLanes);
    const Float* half = reinterpret_cast<const Float*>(half_squares + block * kLanes);
    Float score[kRows][kPanels];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) score[r][p] = half[p];
    }
    for (int64_t start = 0; start < d; start += kChunk) {
      const int64_t n = d - start < kChunk ? d - start : kChunk;
      const float* tile = y + start * kRows;
      for (int64_t j = 0; j < n; ++j, codes += kPanels) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Float value = Simd::broadcast(tile[r * kChunk + j]);
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) score[r][p] = Simd::subtract_product(score[r][p], value, codes[p]);
        }
      }
    }
    sink(block, score);
  }
}

void top_two(const float* y, const float* panels, const float* half_squares, int64_t blocks, int64_t d, float* best, float* second,
             int64_t* index) {
  Float best_lanes[kRows], second_lanes[kRows];
  Int panel_lanes[kRows];
  for (int r = 0; r < kRows; ++r) {
    best_lanes[r] = second_lanes[r] = Simd::broadcast(kInfinity);
    panel_lanes[r] = Int{};
  }
  score_blocks(y, panels, half_squares, blocks, d, [&](int64_t block, const Float(&score)[kRows][kPanels]) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        const Float s = score[r][p];
        panel_lanes[r] = s < best_lanes[r] ? Int{} + static_cast<int32_t>(block * kPanels + p) : panel_lanes[r];
        second_lanes[r] = Simd::min(Simd::max(s, best_lanes[r]), second_lanes[r]);
        best_lanes[r] = Simd::min(s, best_lanes[r]);
      }
    }
  });
  for (int r = 0; r < kRows; ++r) {
    best[r] = Simd::min_across(best_lanes[r]);
    const int lane = Simd::first_equal(best_lanes[r], best[r]);
    index[r] = static_cast<int64_t>(panel_lanes[r][lane]) * kWidth + lane;
    const Float others = Simd::with_infinity(best_lanes[r], lane);
    second[r] = Simd::min_across(Simd::min(others, second_lanes[r]));
  }
}

void scores(const float* y, const float* panels, const float* half_squares, int64_t blocks, int64_t d, float* out) {
  score_blocks(y, panels, half_squares, blocks, d, [&](int64_t block, const Float(&score)[kRows][kPanels]) __attribute__((always_inline)) {
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(out + r * blocks * kLanes + block * kLanes, score[r], sizeof score[r]);
    }
  });
}

constexpr VqAssignKernel kKernel{kRows, kLanes, load, top_two, scores};

}  // namespace
}  // namespace uefl::cpu

#endif
