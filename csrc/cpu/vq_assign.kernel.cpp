// The search in float32 on vectors. AMX has its own kernels.
#include "cpu/simd.h"
#include "cpu/variant.h"
#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int kPanels = 2, kCodewords = kPanels * kLanes;  // vectors of a block of codewords, and codewords
#if defined(__AVX512F__)
constexpr int kRows = 12;  // 12 x 2 sums, 2 vectors of codewords and a row element take 27 of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 6;  // takes 15 of 16 registers
#else
constexpr int kRows = 4;  // takes 12 of 16 registers, and some for products in flight
#endif
constexpr int kGroups =
    48 / kRows;  // groups of rows that pass by a block of codewords; the block stays in the first-level cache
constexpr int64_t kLine = 64;  // bytes of a cache line, and the alignment of panels
constexpr float kInfinity = __builtin_inff();

// Returns the floats of a group of rows, which is [ceil(d / 64)][kRows][64]. The distance between rows is
// constant, so the compiler can address each row directly.
inline int64_t group_floats(int64_t d) { return (d + kChunk - 1) / kChunk * kChunk * kRows; }
int64_t tile_bytes(int64_t, int64_t d) {
  return kGroups * group_floats(d) * static_cast<int64_t>(sizeof(float));
}

int64_t block_bytes(int64_t d) {
  const int64_t bytes = d * kCodewords * static_cast<int64_t>(sizeof(float));
  return (bytes + kLine - 1) / kLine * kLine;
}

double pack(const float* code, int64_t d, int64_t lane, void* block) {
  for (int64_t j = 0; j < d; ++j) static_cast<float*>(block)[j * kCodewords + lane] = code[j];
  return 0;
}

// Returns |y|^2 of a row of a group, which is padded with zeros to whole vectors.
inline double square_row(const float* row, int64_t d) {
  Floats sum[2] = {}, value;  // two sums, so that an addition does not wait for the one before it
  for (int64_t start = 0; start < d; start += kChunk, row += kRows * kChunk) {
    for (int64_t j = 0; j < kChunk && start + j < d; j += kLanes) {
      load(row + j, value);
      sum[j / kLanes % 2] += value * value;
    }
  }
  return square_bound(sum_across(sum[0] + sum[1]), d);
}

void load_rows(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y,
               RowSize* size) {
  with_type(dtype, [&]<class T>(const T*) {
    float* group = static_cast<float*>(y);
    for (int64_t first = 0; first < count; first += kRows, group += group_floats(d)) {
      for (int64_t start = 0; start < d; start += kChunk) {
        load_chunk<T, kRows, kLanes>(source + first, count - first, start, d, mean, group + start * kRows);
      }
      for (int r = 0; r < kRows && first + r < count; ++r)
        size[first + r] = {square_row(group + r * kChunk, d), 0};
    }
  });
}

// Computes the scores of each group of rows with each block of codewords, and passes them in registers to
// sink(block, group, scores).
template <class Sink>
UEFL_INLINE void score_blocks(const void* y, int64_t count, const void* panels, const float* half_squares,
                              int64_t blocks, int64_t d, Ahead ahead, const Sink& sink) {
  const int64_t groups = (count + kRows - 1) / kRows, steps = blocks * groups * ((d + kChunk - 1) / kChunk);
  const int64_t lines =
      ((ahead.end - ahead.next + kLine - 1) / kLine + steps - 1) / steps;  // lines to prefetch per step
  for (int64_t block = 0; block < blocks; ++block) {
    const float* tile = static_cast<const float*>(y);
    for (int64_t group = 0; group < groups; ++group) {
      const Floats* codewords =
          reinterpret_cast<const Floats*>(static_cast<const char*>(panels) + block * block_bytes(d));
      Floats score[kRows][kPanels];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) load(half_squares + block * kCodewords + p * kLanes, score[r][p]);
      }
      for (int64_t start = 0; start < d; start += kChunk, tile += kRows * kChunk) {
        const int64_t n = d - start < kChunk ? d - start : kChunk;
        for (int64_t i = 0; i < lines && ahead.next < ahead.end; ++i, ahead.next += kLine)
          __builtin_prefetch(ahead.next, 0, 2);
        for (int64_t j = 0; j < n; ++j, codewords += kPanels) {
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const Floats value = broadcast(tile[r * kChunk + j]);
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) subtract_product(value, codewords[p], score[r][p]);
          }
        }
      }
      sink(block, group, score);
    }
  }
}

void top_two(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
             int64_t d, Ahead ahead, float* best, float* second, int64_t* index) {
  struct {
    Floats best, second;
    Ints panel;
  } state[kGroups * kRows];
  for (auto& row : state) row = {broadcast(kInfinity), broadcast(kInfinity), Ints{}};
  score_blocks(y, count, panels, half_squares, blocks, d, ahead,
               [&](int64_t block, int64_t group, const Floats(&score)[kRows][kPanels])
                   __attribute__((always_inline)) {
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

void scores(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
            int64_t d, float* out) {
  score_blocks(y, count, panels, half_squares, blocks, d, {},
               [&](int64_t block, int64_t group, const Floats(&score)[kRows][kPanels])
                   __attribute__((always_inline)) {
                     for (int64_t r = 0; r < kRows && group * kRows + r < count; ++r) {
                       __builtin_memcpy(out + (group * kRows + r) * blocks * kCodewords + block * kCodewords,
                                        score[r], sizeof score[r]);
                     }
                   });
}

}  // namespace

const VqAssignKernel UEFL_VARIANT(vq_assign){
    Arithmetic::f32, kGroups * kRows, kCodewords, tile_bytes, block_bytes, pack, load_rows, top_two, scores};

}  // namespace uefl::cpu
