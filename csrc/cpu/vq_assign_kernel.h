// The search on one tile of rows: what each instruction set offers, and its body in float32, which all but AMX share. Each
// vq_assign.<isa>.cpp includes this body under the flags of its instruction set; no standard templates and internal linkage throughout,
// for the reason given in strided_rows.h.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

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

// The entry points of one instruction set. A tile holds up to `rows` rows; a block holds `block_codes` codewords.
struct VqAssignKernel {
  Arithmetic arithmetic;
  int rows, block_codes;
  // Memory for a tile of `count` rows and for a block of codewords: multiples of 64, and so aligned.
  int64_t (*tile_bytes)(int64_t count, int64_t d);
  int64_t (*block_bytes)(int64_t d);
  // Puts one centred codeword into its lane of a block, which was zero. Returns |b - b1|^2 where there are parts.
  double (*pack)(const float* code, int64_t d, int64_t lane, void* block);
  // y = row - mean for the rows that start at source[0 .. count), their elements side by side, and the size of each; both have room for
  // all rows of the tile.
  void (*load)(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y, RowSize* size);
  // Best and second-best score of each row over all blocks, and the codeword of the best.
  void (*top_two)(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, Ahead ahead,
                  float* best, float* second, int64_t* index);
  // All scores, [count][blocks * block_codes].
  void (*scores)(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, float* out);
  // Where a kernel searches rows as it loads them, and then has no top_two: both in one. Its load() and scores() take up to kRescored rows.
  void (*load_top_two)(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y, RowSize* size,
                       const void* panels, const float* half_squares, int64_t blocks, float* best, float* second, int64_t* index) = nullptr;
};

extern const VqAssignKernel vq_assign_portable, vq_assign_avx2, vq_assign_avx512, vq_assign_amx, vq_assign_small_k_amx;

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
inline void load_chunk(const char* const* source, int64_t count, int64_t start, int64_t d, const float* mean, float* chunk) {
  const int64_t n = d - start < kChunk ? d - start : kChunk;
  mean += start;
  for (int r = 0; r < kRows; ++r, chunk += kChunk) {
    const T* x = reinterpret_cast<const T*>(source[r < count ? r : count - 1]) + start;
    if (n == kChunk) {
      for (int64_t j = 0; j < kChunk; ++j) chunk[j] = centre(x[j], mean[j]);
    } else {
      for (int64_t j = 0; j < n; ++j) chunk[j] = centre(x[j], mean[j]);
    }
    for (int64_t j = n; j % kFill != 0; ++j) chunk[j] = 0;
  }
}

}  // namespace
}  // namespace uefl::cpu

#if defined(UEFL_KERNEL_BODY)

#include "cpu/simd.h"

namespace uefl::cpu {
namespace {

constexpr int kPanels = 2, kCodes = kPanels * kLanes;  // vectors of a block of codewords, and codewords
#if defined(__AVX512F__)
constexpr int kRows = 12;  // 12 x 2 sums, 2 vectors of codewords and a row element fill 27 of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 6;  // 15 of 16
#else
constexpr int kRows = 4;  // 12 of 16, and products on their way to the sums
#endif
constexpr int kGroups = 48 / kRows;  // groups of rows that pass by a block of codewords, which stays in the first-level cache
constexpr int64_t kLine = 64;        // of the cache, and the alignment of panels
constexpr float kInfinity = __builtin_inff();

// A group of rows is laid out [ceil(d / 64)][kRows][64]: rows at a distance known to the compiler, so that each is one address away.
inline int64_t group_floats(int64_t d) { return (d + kChunk - 1) / kChunk * kChunk * kRows; }
int64_t tile_bytes(int64_t, int64_t d) { return kGroups * group_floats(d) * static_cast<int64_t>(sizeof(float)); }

int64_t block_bytes(int64_t d) {
  const int64_t bytes = d * kCodes * static_cast<int64_t>(sizeof(float));
  return (bytes + kLine - 1) / kLine * kLine;
}

double pack(const float* code, int64_t d, int64_t lane, void* block) {
  for (int64_t j = 0; j < d; ++j) static_cast<float*>(block)[j * kCodes + lane] = code[j];
  return 0;
}

// |y|^2 of a row of a group, filled up with zeros to whole vectors.
inline double square_row(const float* row, int64_t d) {
  Floats sum[2] = {}, value;  // two, so that one addition need not wait for the last
  for (int64_t start = 0; start < d; start += kChunk, row += kRows * kChunk) {
    for (int64_t j = 0; j < kChunk && start + j < d; j += kLanes) {
      load(row + j, value);
      sum[j / kLanes % 2] += value * value;
    }
  }
  return square_bound(sum_across(sum[0] + sum[1]), d);
}

void load_rows(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y, RowSize* size) {
  with_type(dtype, [&]<class T>(const T*) {
    float* group = static_cast<float*>(y);
    for (int64_t first = 0; first < count; first += kRows, group += group_floats(d)) {
      for (int64_t start = 0; start < d; start += kChunk) {
        load_chunk<T, kRows, kLanes>(source + first, count - first, start, d, mean, group + start * kRows);
      }
      for (int r = 0; r < kRows && first + r < count; ++r) size[first + r] = {square_row(group + r * kChunk, d), 0};
    }
  });
}

// Scores of each group of rows against each block of codewords, handed to sink(block, group, scores) in registers.
template <class Sink>
UEFL_INLINE void score_blocks(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d,
                              Ahead ahead, const Sink& sink) {
  const int64_t groups = (count + kRows - 1) / kRows, steps = blocks * groups * ((d + kChunk - 1) / kChunk);
  const int64_t lines = ((ahead.end - ahead.next + kLine - 1) / kLine + steps - 1) / steps;  // to ask for in a step
  for (int64_t block = 0; block < blocks; ++block) {
    const float* tile = static_cast<const float*>(y);
    for (int64_t group = 0; group < groups; ++group) {
      const Floats* codes = reinterpret_cast<const Floats*>(static_cast<const char*>(panels) + block * block_bytes(d));
      Floats score[kRows][kPanels];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) load(half_squares + block * kCodes + p * kLanes, score[r][p]);
      }
      for (int64_t start = 0; start < d; start += kChunk, tile += kRows * kChunk) {
        const int64_t n = d - start < kChunk ? d - start : kChunk;
        for (int64_t i = 0; i < lines && ahead.next < ahead.end; ++i, ahead.next += kLine) __builtin_prefetch(ahead.next, 0, 2);
        for (int64_t j = 0; j < n; ++j, codes += kPanels) {
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const Floats value = broadcast(tile[r * kChunk + j]);
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) subtract_product(value, codes[p], score[r][p]);
          }
        }
      }
      sink(block, group, score);
    }
  }
}

void top_two(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, Ahead ahead,
             float* best, float* second, int64_t* index) {
  struct {
    Floats best, second;
    Ints panel;
  } state[kGroups * kRows];
  for (auto& row : state) row = {broadcast(kInfinity), broadcast(kInfinity), Ints{}};
  score_blocks(y, count, panels, half_squares, blocks, d, ahead,
               [&](int64_t block, int64_t group, const Floats(&score)[kRows][kPanels]) __attribute__((always_inline)) {
                 const Ints first = broadcast(static_cast<int32_t>(block * kPanels)), other = first + 1;
#pragma GCC unroll 16
                 for (int r = 0; r < kRows; ++r) {
                   auto& row = state[group * kRows + r];
                   const Floats &a = score[r][0], &b = score[r][1], low = least(b, a), high = most(a, b);
                   row.panel = low < row.best ? (b < a ? other : first) : row.panel;
                   row.second = least(least(most(low, row.best), high), row.second);
                   row.best = least(low, row.best);
                 }
               });
  for (int64_t r = 0; r < count; ++r) {
    best[r] = least_across(state[r].best);
    const uint32_t lanes = lanes_not_above(state[r].best, broadcast(best[r]));
    const int lane = lanes ? __builtin_ctz(lanes) : 0;
    index[r] = static_cast<int64_t>(state[r].panel[lane]) * kLanes + lane;
    second[r] = least_across(least(with_infinity(state[r].best, lane), state[r].second));
  }
}

void scores(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, float* out) {
  score_blocks(y, count, panels, half_squares, blocks, d, {},
               [&](int64_t block, int64_t group, const Floats(&score)[kRows][kPanels]) __attribute__((always_inline)) {
                 for (int64_t r = 0; r < kRows && group * kRows + r < count; ++r) {
                   __builtin_memcpy(out + (group * kRows + r) * blocks * kCodes + block * kCodes, score[r], sizeof score[r]);
                 }
               });
}

constexpr VqAssignKernel kKernel{Arithmetic::f32, kGroups * kRows, kCodes, tile_bytes, block_bytes, pack, load_rows, top_two, scores};

}  // namespace
}  // namespace uefl::cpu

#endif
