// The search on one tile of rows: what each instruction set offers, and its body in float32, which all but AMX share. Each
// vq_assign.<isa>.cpp defines `Simd`, the vectors of its instruction set, and includes this body. No standard templates and internal
// linkage throughout, for the reason given in rows.h.
#pragma once

#include <cstdint>

#include "cpu/rows.h"

namespace uefl::cpu {

// What the scores are computed in, which decides how far to trust them (common/certificate.h).
enum class Arithmetic { f32, bf16x3, bf16, i16 };

// Upper bounds for the certificate: |y|^2, and |y - y1|^2 of the first part where the arithmetic has parts.
struct RowSize {
  double square, rest;
};

// The rows that will be loaded next, where they lie in one piece; a kernel may ask the memory for them while it computes.
struct Ahead {
  const char *next, *end;
};

// The entry points of one instruction set. A tile holds up to `rows` rows; a block holds `lanes` codewords.
struct VqAssignKernel {
  Arithmetic arithmetic;
  int rows, lanes;
  // Memory for a tile of `count` rows and for a block of codewords: multiples of 64, and so aligned.
  int64_t (*tile_bytes)(int64_t count, int64_t d);
  int64_t (*block_bytes)(int64_t d);
  // Puts one centred codeword into its lane of a block, which was zero. Returns |b - b1|^2 where there are parts.
  double (*pack)(const float* code, int64_t d, int64_t lane, void* block);
  // y = row - mean for the rows that start at source[0 .. count), and the size of each; both have room for all rows of the tile.
  void (*load)(const char* const* source, int64_t count, Dtype dtype, int64_t stride, int64_t d, const float* mean, void* y, RowSize* size);
  // Best and second-best score of each row over all blocks, and the codeword of the best.
  void (*top_two)(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, Ahead ahead,
                  float* best, float* second, int64_t* index);
  // All scores, [rows][blocks * lanes].
  void (*scores)(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, float* out);
  // Where a kernel searches rows as it loads them, and then has no top_two: both in one. Its load() and scores() take up to kRescored rows.
  void (*load_top_two)(const char* const* source, int64_t count, Dtype dtype, int64_t stride, int64_t d, const float* mean, void* y,
                       RowSize* size, const void* panels, const float* half_squares, int64_t blocks, float* best, float* second,
                       int64_t* index) = nullptr;
};

extern const VqAssignKernel vq_assign_portable, vq_assign_avx2, vq_assign_avx512, vq_assign_amx, vq_assign_few_amx;

constexpr int64_t kRescored = 32;  // rows that are scored again together

namespace {

constexpr int64_t kChunk = 64;  // elements of a row that are loaded together

// Float32 sums of d squares are too small by less than 1 % and what underflowed.
inline double square_bound(double sum, int64_t d) { return 1.01 * sum + static_cast<double>(d) * 0x1p-125; }

template <class T>
inline float centre(T value, float mean) {
  return static_cast<float>(widen(value) - mean);  // in float64 for float64, then rounded once
}

// Elements [start, min(start + 64, d)) of kRows rows, less the mean, into chunk [kRows][64], filled up with zeros to a multiple of
// kFill. Rows from `count` on repeat the last.
template <class T, int kRows, int kFill>
inline void load_chunk(const char* const* source, int64_t count, int64_t stride, int64_t start, int64_t d, const float* mean,
                       float* chunk) {
  const int64_t n = d - start < kChunk ? d - start : kChunk;
  const auto row = [&](int r) { return reinterpret_cast<const T*>(source[r < count ? r : count - 1]) + start * stride; };
  mean += start;
  if (stride == 1) {
    for (int r = 0; r < kRows; ++r) {
      const T* x = row(r);
      if (n == kChunk) {
        for (int64_t j = 0; j < kChunk; ++j) chunk[r * kChunk + j] = centre(x[j], mean[j]);
      } else {
        for (int64_t j = 0; j < n; ++j) chunk[r * kChunk + j] = centre(x[j], mean[j]);
      }
    }
  } else {  // neighbouring rows share cache lines when dim is not the innermost dimension
    for (int64_t j = 0; j < n; ++j) {
      for (int r = 0; r < kRows; ++r) chunk[r * kChunk + j] = centre(row(r)[j * stride], mean[j]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = n; j % kFill != 0; ++j) chunk[r * kChunk + j] = 0;
  }
}

}  // namespace
}  // namespace uefl::cpu

#if defined(UEFL_KERNEL_BODY)

namespace uefl::cpu {
namespace {

using Float = Simd::Float;
using Int = Simd::Int;
constexpr int kRows = Simd::rows, kWidth = Simd::width, kPanels = 2, kLanes = kPanels * kWidth;
constexpr float kInfinity = __builtin_inff();

// y is laid out [ceil(d / 64)][kRows][64]: rows at a distance known to the compiler, so that each is one address away.
constexpr int64_t kSquareStep = 16;  // elements that square_rows reads at once

typedef float Float8 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));

inline __attribute__((always_inline)) void add_squares(const float* values, Double8& sum) {
  Float8 narrow;
  __builtin_memcpy(&narrow, values, sizeof narrow);
  const Double8 wide = __builtin_convertvector(narrow, Double8);
  sum += wide * wide;
}

// In float64, where squares of floats neither overflow nor underflow.
void square_rows(const float* y, int64_t d, RowSize* size) {
  for (int r = 0; r < kRows; ++r) {
    Double8 even = {}, odd = {};  // two sums, so that one addition need not wait for the last
    for (int64_t j = 0; j < d; j += kSquareStep) {
      const float* values = y + (j / kChunk * kRows + r) * kChunk + j % kChunk;
      add_squares(values, even);
      add_squares(values + 8, odd);
    }
    const Double8 sum = even + odd;
    size[r] = {((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7])), 0};
  }
}

void load(const char* const* source, int64_t count, Dtype dtype, int64_t stride, int64_t d, const float* mean, void* y, RowSize* size) {
  float* tile = static_cast<float*>(y);
  with_type(dtype, [&]<class T>(const T*) {
    for (int64_t start = 0; start < d; start += kChunk) {
      load_chunk<T, kRows, kSquareStep>(source, count, stride, start, d, mean, tile + start * kRows);
    }
  });
  square_rows(tile, d, size);
}

constexpr int64_t kLine = 64;  // of the cache, and the alignment of panels

int64_t tile_bytes(int64_t, int64_t d) { return (d + kChunk - 1) / kChunk * kChunk * kRows * static_cast<int64_t>(sizeof(float)); }

int64_t block_bytes(int64_t d) {
  const int64_t bytes = d * kLanes * static_cast<int64_t>(sizeof(float));
  return (bytes + kLine - 1) / kLine * kLine;
}

double pack(const float* code, int64_t d, int64_t lane, void* block) {
  for (int64_t j = 0; j < d; ++j) static_cast<float*>(block)[j * kLanes + lane] = code[j];
  return 0;
}

// Scores of all rows of the tile against each block of codewords in turn, handed to sink(block, scores) in registers.
template <class Sink>
inline __attribute__((always_inline)) void score_blocks(const void* y, const void* panels, const float* half_squares, int64_t blocks,
                                                        int64_t d, Ahead ahead, const Sink& sink) {
  const int64_t steps = blocks * ((d + kChunk - 1) / kChunk);
  const int64_t lines = ((ahead.end - ahead.next + kLine - 1) / kLine + steps - 1) / steps;  // to ask for in a step
  for (int64_t block = 0; block < blocks; ++block) {
    const Float* codes = reinterpret_cast<const Float*>(static_cast<const char*>(panels) + block * block_bytes(d));
    Float score[kRows][kPanels];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) __builtin_memcpy(&score[r][p], half_squares + block * kLanes + p * kWidth, sizeof(Float));
    }
    for (int64_t start = 0; start < d; start += kChunk) {
      const int64_t n = d - start < kChunk ? d - start : kChunk;
      const float* tile = static_cast<const float*>(y) + start * kRows;
      for (int64_t i = 0; i < lines && ahead.next < ahead.end; ++i, ahead.next += kLine) __builtin_prefetch(ahead.next, 0, 2);
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

void top_two(const void* y, int64_t, const void* panels, const float* half_squares, int64_t blocks, int64_t d, Ahead ahead, float* best,
             float* second, int64_t* index) {
  Float best_lanes[kRows], second_lanes[kRows];
  Int panel_lanes[kRows];
  for (int r = 0; r < kRows; ++r) {
    best_lanes[r] = second_lanes[r] = Simd::broadcast(kInfinity);
    panel_lanes[r] = Int{};
  }
  score_blocks(y, panels, half_squares, blocks, d, ahead,
               [&](int64_t block, const Float(&score)[kRows][kPanels]) __attribute__((always_inline)) {
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

void scores(const void* y, int64_t, const void* panels, const float* half_squares, int64_t blocks, int64_t d, float* out) {
  score_blocks(y, panels, half_squares, blocks, d, {},
               [&](int64_t block, const Float(&score)[kRows][kPanels]) __attribute__((always_inline)) {
                 for (int r = 0; r < kRows; ++r) {
                   __builtin_memcpy(out + r * blocks * kLanes + block * kLanes, score[r], sizeof score[r]);
                 }
               });
}

constexpr VqAssignKernel kKernel{Arithmetic::f32, kRows, kLanes, tile_bytes, block_bytes, pack, load, top_two, scores};

}  // namespace
}  // namespace uefl::cpu

#endif
