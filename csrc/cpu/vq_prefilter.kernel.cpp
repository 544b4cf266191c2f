// The prefilter in 16-bit fixed point. An instruction multiplies twice the elements of an FMA, and the sums
// are exact. AMX has its own prefilter, vq_prefilter.amx.cpp.
#if defined(__SSE2__) && (!defined(__AVX512F__) || defined(__AVX512VNNI__))  // elsewhere float32 is as fast
#include "cpu/variant.h"
#include "cpu/vq_prefilter_candidates.h"

namespace uefl::cpu {
namespace {

constexpr int kPanels = 2, kCodewords = kPanels * kLanes;  // vectors of a block of codewords, and codewords
#if defined(__AVX512F__)
// 12 x 2 sums, 2 vectors of codewords and a row element take 27 of 32 registers.
constexpr int kRows = 12, kGroups = 4;
#elif defined(__AVX2__)
// 12 sums, 2 vectors of codewords, a row element and products take all 16 registers.
constexpr int kRows = 6, kGroups = 8;
#else
constexpr int kRows = 4, kGroups = 12;
#endif
// The rows of a tile. Its groups pass by a block of codewords, which stays in the first-level cache.
constexpr int kTileRows = kRows * kGroups;
constexpr int kChunkBlocks = 16;        // blocks of scores that are scanned together
constexpr int64_t kDepth = 2 * kLanes;  // elements that are packed together, into kLanes words
constexpr int64_t kLine = 64;

inline int64_t words(int64_t d) { return (d + kDepth - 1) / kDepth * kLanes; }

// A tile has the unit of each row, its words [groups][ceil(words / 64)][kRows][64], in which each row has a
// constant offset, and a buffer for the floats of a row.
constexpr int64_t kUnitBytes = (kTileRows * 4 + kLine - 1) / kLine * kLine;
inline int64_t group_words(int64_t d) { return (words(d) + kChunk - 1) / kChunk * kChunk * kRows; }
int64_t tile_bytes(int64_t, int64_t d) {
  return kUnitBytes + kGroups * group_words(d) * 4 + (d + kChunk - 1) / kChunk * kChunk * 4;
}
int64_t block_bytes(int64_t d) { return words(d) * kCodewords * 4; }

// Converts kDepth elements to units, as pairs in kLanes words. The order of the elements does not matter as
// long as rows and codewords agree. Adds the squared rounding errors to `rest`.
UEFL_INLINE Ints quantize(const float* values, float unit, float per_unit, Floats& rest) {
  Ints integers[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    Floats value;
    load(values + i * kLanes, value);
    integers[i] = rounded(value * per_unit);
    subtract_product(__builtin_convertvector(integers[i], Floats), broadcast(unit), value);
    rest += value * value;
  }
  return pairs_of(integers[0], integers[1]);
}

double pack(const float* code, int64_t d, float unit, int64_t lane, void* block) {
  int32_t* target = static_cast<int32_t*>(block) + lane;
  Floats rest = {};
  for (int64_t start = 0; start < d; start += kDepth) {
    float values[kDepth] = {};
    if (start + kDepth <= d) {
      __builtin_memcpy(values, code + start, sizeof values);
    } else {
      for (int64_t j = start; j < d; ++j) values[j - start] = code[j];
    }
    const Ints pairs = quantize(values, unit, 1 / unit, rest);
#pragma GCC unroll 16
    for (int w = 0; w < kLanes; ++w) target[w * kCodewords] = pairs[w];
    target += kLanes * kCodewords;
  }
  return square_bound(sum_across(rest), d);
}

// Writes a row minus the mean, padded with zeros to a multiple of kDepth.
template <class T>
inline void center_row(const T* x, int64_t d, const float* mean, float* y) {
  for (int64_t j = 0; j < d; ++j) y[j] = center(x[j], mean[j]);
  for (int64_t j = d; j % kDepth != 0; ++j) y[j] = 0;
}

void load_rows(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y,
               RowSize* size) {
  float* const units = static_cast<float*>(y);
  int32_t* const packed = reinterpret_cast<int32_t*>(static_cast<char*>(y) + kUnitBytes);
  float* const row = reinterpret_cast<float*>(packed + kGroups * group_words(d));
  const int64_t depth = words(d);
  for (int64_t r = 0; r < count; ++r) {
    with_type(dtype,
              [&]<class T>(const T*) { center_row(reinterpret_cast<const T*>(source[r]), d, mean, row); });
    Floats sum[2] = {}, largest[2] = {}, rest = {}, value;
    for (int64_t j = 0; j < d; j += kDepth) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        load(row + j + i * kLanes, value);
        sum[i] += value * value;
        largest[i] = most(magnitude(value), largest[i]);
      }
    }
    const double square = square_bound(sum_across(sum[0] + sum[1]), d);
    units[r] =
        fixed_unit(__builtin_sqrtf(static_cast<float>(square)), most_across(most(largest[0], largest[1])));
    const float per_unit = 1 / units[r];
    int32_t* target = packed + r / kRows * group_words(d) + r % kRows * kChunk;
    for (int64_t w = 0; w < depth; w += kLanes) {
      store(quantize(row + 2 * w, units[r], per_unit, rest),
            target + w / kChunk * kChunk * kRows + w % kChunk);
    }
    size[r] = {square, square_bound(sum_across(rest), d)};
  }
}

// Lists the codewords of some blocks, from number `first` on, whose score with row r is within its margin.
inline void note_close(const float (*scores)[kTileRows][kCodewords], int64_t blocks, int64_t first, int r,
                       CandidateLists& out) {
  const Floats limit = broadcast(out.best[r] + out.margin[r]);
  for (int64_t block = 0; block < blocks; ++block) {
    Floats low, high;
    load(scores[block][r], low);
    load(scores[block][r] + kLanes, high);
    uint32_t close = lanes_not_above(low, limit) | lanes_not_above(high, limit) << kLanes;
    if (__builtin_expect(close == 0, 1)) continue;
    for (; close; close &= close - 1) {
      const int i = __builtin_ctz(close);
      note(out, r, static_cast<int>(first + block) * kCodewords + i, scores[block][r][i]);
    }
  }
}

void candidates(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
                int64_t d, float unit, Ahead ahead, void* scratch, CandidateLists& out) {
  const float* const units = static_cast<const float*>(y);
  const int64_t depth = words(d), groups = (count + kRows - 1) / kRows,
                steps = blocks * groups * ((depth + kChunk - 1) / kChunk);
  const int64_t lines =
      ((ahead.end - ahead.next + kLine - 1) / kLine + steps - 1) / steps;       // lines to prefetch per step
  auto* const scores = static_cast<float (*)[kTileRows][kCodewords]>(scratch);  // scores of a chunk of blocks
  Floats lowest[kTileRows];
  for (int r = 0; r < kTileRows; ++r) out.best[r] = __builtin_inff(), out.count[r] = 0;
  for (int64_t begin = 0; begin < blocks; begin += kChunkBlocks) {
    const int64_t end = begin + kChunkBlocks < blocks ? begin + kChunkBlocks : blocks;
    for (int r = 0; r < kTileRows; ++r) lowest[r] = broadcast(out.best[r]);
    for (int64_t block = begin; block < end; ++block) {
      const int32_t* tile = reinterpret_cast<const int32_t*>(static_cast<const char*>(y) + kUnitBytes);
      for (int64_t group = 0; group < groups; ++group) {
        const Ints* codewords =
            reinterpret_cast<const Ints*>(static_cast<const char*>(panels) + block * block_bytes(d));
        Ints sum[kRows][kPanels];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = Ints{};
        for (int64_t start = 0; start < depth; start += kChunk, tile += kRows * kChunk) {
          const int64_t n = depth - start < kChunk ? depth - start : kChunk;
          for (int64_t i = 0; i < lines && ahead.next < ahead.end; ++i, ahead.next += kLine)
            __builtin_prefetch(ahead.next, 0, 2);
          for (int64_t j = 0; j < n; ++j, codewords += kPanels) {
            const Ints first = codewords[0], second = codewords[1];
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
              const Ints pair = broadcast(tile[r * kChunk + j]);
              add_pair_products(pair, first, sum[r][0]);
              add_pair_products(pair, second, sum[r][1]);
            }
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const int64_t row = group * kRows + r;
          const Floats units_of_product = broadcast(units[row] * unit);
          Floats score[kPanels];
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) {
            load(half_squares + block * kCodewords + p * kLanes, score[p]);
            subtract_product(__builtin_convertvector(sum[r][p], Floats), units_of_product, score[p]);
            store(score[p], scores[block - begin][row] + p * kLanes);
          }
          lowest[row] = least(least(score[0], score[1]), lowest[row]);
        }
      }
    }
    for (int r = 0; r < count; ++r) {
      out.best[r] = least_across(lowest[r]);
      note_close(scores, end - begin, begin, r, out);
    }
  }
}

}  // namespace

const PrefilterKernel UEFL_VARIANT(vq_prefilter){Arithmetic::i16,
                                                 kTileRows,
                                                 kCodewords,
                                                 tile_bytes,
                                                 block_bytes,
                                                 kChunkBlocks * kTileRows * kCodewords * 4,
                                                 pack,
                                                 load_rows,
                                                 candidates,
                                                 score_candidates};

}  // namespace uefl::cpu
#endif
