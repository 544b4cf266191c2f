// The search on one tile of rows: the interface that each instruction set implements.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

// The arithmetic of the scores, which decides their error bound (common/certificate.h).
enum class Arithmetic { f32, bf16x3, bf16, i16 };

// Upper bounds for the certificate: |y|^2, and |y - y1|^2 of the first part if the arithmetic has parts.
struct RowSize {
  double square, rest;
};

// The rows that will be loaded next, if they are contiguous. A kernel may prefetch them.
struct Ahead {
  const char *next, *end;
};

// The entry points of one instruction set. A tile has up to `rows` rows, and a block has `block_codewords`
// codewords.
struct VqAssignKernel {
  Arithmetic arithmetic;
  int rows, block_codewords;
  // Return the bytes of a tile of `count` rows, and of a block of codewords. Both are multiples of 64, so
  // they stay aligned.
  int64_t (*tile_bytes)(int64_t count, int64_t d);
  int64_t (*block_bytes)(int64_t d);
  // Writes one centered codeword into its lane of a zeroed block. Returns |b - b1|^2 if the arithmetic has
  // parts.
  double (*pack)(const float* code, int64_t d, int64_t lane, void* block);
  // Writes y = row - mean for the contiguous rows at source[0 .. count), and the size of each row. Both
  // arrays have room for all rows of the tile.
  void (*load)(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y,
               RowSize* size);
  // Finds the best and second-best score of each row over all blocks, and the codeword of the best score.
  void (*top_two)(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
                  int64_t d, Ahead ahead, float* best, float* second, int64_t* index);
  // Writes all scores, [count][blocks * block_codewords].
  void (*scores)(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
                 int64_t d, float* out);
  // Runs load() and top_two() in one, for a kernel that searches rows while it loads them and has no top_two.
  // Its load() and scores() take up to kRescored rows.
  void (*load_top_two)(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean,
                       void* y, RowSize* size, const void* panels, const float* half_squares, int64_t blocks,
                       float* best, float* second, int64_t* index) = nullptr;
};

extern const VqAssignKernel vq_assign_portable, vq_assign_avx2, vq_assign_avx512, vq_assign_amx,
    vq_assign_small_k_amx;

constexpr int64_t kRescored = 32;  // rows that are scored again together

namespace {

constexpr int64_t kChunk = 64;  // elements of a row that are loaded together

// Bounds |y|^2. A float32 sum of d squares is too small by less than 1 % plus underflow.
inline double square_bound(double sum, int64_t d) { return 1.01 * sum + static_cast<double>(d) * 0x1p-125; }

template <class T>
inline float center(T value, float mean) {
  return static_cast<float>(widen(value) - mean);  // in float64 for float64, then rounded once
}

// Loads elements [start, min(start + 64, d)) of kRows rows, minus the mean, into a chunk [kRows][64], padded
// with zeros to a multiple of kFill. Rows from `count` on repeat the last row.
template <class T, int kRows, int kFill>
inline void load_chunk(const char* const* source, int64_t count, int64_t start, int64_t d, const float* mean,
                       float* chunk) {
  const int64_t n = d - start < kChunk ? d - start : kChunk;
  mean += start;
  for (int r = 0; r < kRows; ++r, chunk += kChunk) {
    const T* x = reinterpret_cast<const T*>(source[r < count ? r : count - 1]) + start;
    if (n == kChunk) {
      for (int64_t j = 0; j < kChunk; ++j) chunk[j] = center(x[j], mean[j]);
    } else {
      for (int64_t j = 0; j < n; ++j) chunk[j] = center(x[j], mean[j]);
    }
    for (int64_t j = n; j % kFill != 0; ++j) chunk[j] = 0;
  }
}

}  // namespace
}  // namespace uefl::cpu
