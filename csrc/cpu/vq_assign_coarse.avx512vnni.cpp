// The first pass in 16-bit fixed point: VPDPWSSD multiplies twice as many elements as an FMA, and its sums are exact.
#if defined(__x86_64__)
// GCC 12 warns about the deliberately undefined operands in its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#define UEFL_COARSE_BODY
#include "cpu/vq_assign_coarse.h"

namespace uefl::cpu {
namespace {

constexpr int kRows = 12, kPanels = 2, kWidth = 16, kLanes = kPanels * kWidth;  // 12 x 2 sums, 2 codewords and a row: 27 of 32 registers
constexpr int kChunkBlocks = 16;       // whose scores with 12 rows, 24 KiB, are looked through together
constexpr int64_t kDepth = 32;         // elements that are packed together, into 16 words
constexpr int64_t kStep = 2 * kChunk;  // elements of a row that lie side by side: 64 words
constexpr int64_t kLine = 64;

// Around the intrinsic GCC 12 copies every sum, twice, and writes it to memory: half the speed.
inline __attribute__((always_inline)) void add_products(__m512i a, __m512i b, __m512i& sum) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

inline int64_t words(int64_t d) { return (d + kDepth - 1) / kDepth * (kDepth / 2); }

// A tile: the unit of each row, its words [ceil(words / 64)][12][64], so that each row is one constant address away, and its floats
// [ceil(d / 64)][12][64] on their way there.
constexpr int64_t kUnitBytes = 64;
inline int64_t word_bytes(int64_t d) { return (d + kStep - 1) / kStep * kRows * kChunk * 4; }
int64_t tile_bytes(int64_t, int64_t d) { return kUnitBytes + word_bytes(d) + (d + kChunk - 1) / kChunk * kRows * kChunk * 4; }
int64_t block_bytes(int64_t d) { return words(d) * kLanes * 4; }

// 32 elements in units, as pairs in 16 words; which element lies where does not matter, as long as rows and codewords agree. Adds the
// squares of what rounding leaves.
inline __attribute__((always_inline)) __m512i quantise(const float* values, float unit, float per_unit, __m512& rest) {
  __m512i integers[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 value = _mm512_loadu_ps(values + i * kWidth);
    integers[i] = _mm512_cvtps_epi32(_mm512_mul_ps(value, _mm512_set1_ps(per_unit)));
    const __m512 left = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(integers[i]), _mm512_set1_ps(unit), value);
    rest = _mm512_fmadd_ps(left, left, rest);
  }
  return _mm512_packs_epi32(integers[0], integers[1]);
}

double pack(const float* code, int64_t d, float unit, int64_t lane, void* block) {
  int* target = static_cast<int*>(block) + lane;
  __m512 rest = _mm512_setzero_ps();
  for (int64_t start = 0; start < d; start += kDepth) {
    alignas(64) float values[kDepth] = {};
    alignas(64) int pairs[kWidth];
    for (int64_t j = 0; j < kDepth && start + j < d; ++j) values[j] = code[start + j];
    _mm512_store_si512(pairs, quantise(values, unit, 1 / unit, rest));
    for (int w = 0; w < kWidth; ++w, target += kLanes) *target = pairs[w];
  }
  return square_bound(_mm512_reduce_add_ps(rest), d);
}

void load(const char* const* source, int64_t count, Dtype dtype, int64_t stride, int64_t d, const float* mean, void* y, RowSize* size) {
  float* const units = static_cast<float*>(y);
  int* const packed = reinterpret_cast<int*>(static_cast<char*>(y) + kUnitBytes);
  float* const floats = reinterpret_cast<float*>(static_cast<char*>(y) + kUnitBytes + word_bytes(d));
  with_type(dtype, [&]<class T>(const T*) {
    for (int64_t start = 0; start < d; start += kChunk) {
      load_chunk<T, kRows, kDepth>(source, count, stride, start, d, mean, floats + start * kRows);
    }
  });
  const auto at = [](int64_t j, int r) { return (j / kChunk * kRows + r) * kChunk + j % kChunk; };
  for (int r = 0; r < kRows; ++r) {
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, most[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t j = 0; j < d; j += kDepth) {
      for (int i = 0; i < 2; ++i) {
        const __m512 value = _mm512_loadu_ps(floats + at(j, r) + i * kWidth);
        sum[i] = _mm512_fmadd_ps(value, value, sum[i]);
        most[i] = _mm512_max_ps(_mm512_abs_ps(value), most[i]);
      }
    }
    const double square = square_bound(_mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1])), d);
    units[r] = fixed_unit(__builtin_sqrtf(static_cast<float>(square)), _mm512_reduce_max_ps(_mm512_max_ps(most[0], most[1])));
    __m512 rest = _mm512_setzero_ps();
    const float per_unit = 1 / units[r];
    for (int64_t j = 0; j < d; j += kDepth) {
      _mm512_storeu_si512(packed + at(j / 2, r), quantise(floats + at(j, r), units[r], per_unit, rest));
    }
    size[r] = {square, square_bound(_mm512_reduce_add_ps(rest), d)};
  }
}

void candidates(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, float unit,
                Ahead ahead, void* scratch, Candidates& out) {
  const float* const units = static_cast<const float*>(y);
  const int* const packed = reinterpret_cast<const int*>(static_cast<const char*>(y) + kUnitBytes);
  const int64_t depth = words(d), steps = blocks * ((depth + kChunk - 1) / kChunk);
  const int64_t lines = ((ahead.end - ahead.next + kLine - 1) / kLine + steps - 1) / steps;  // to ask for in a step
  auto* const scores = static_cast<float (*)[kChunkBlocks * kLanes]>(scratch);
  for (int r = 0; r < kRows; ++r) out.best[r] = __builtin_inff(), out.count[r] = 0;
  const __m512i* codes = static_cast<const __m512i*>(panels);
  for (int64_t begin = 0; begin < blocks; begin += kChunkBlocks) {
    const int64_t end = begin + kChunkBlocks < blocks ? begin + kChunkBlocks : blocks;
    __m512 lowest[kRows];
    for (int r = 0; r < kRows; ++r) lowest[r] = _mm512_set1_ps(out.best[r]);
    for (int64_t block = begin; block < end; ++block) {
      __m512i sum[kRows][kPanels];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
      for (int64_t start = 0; start < depth; start += kChunk) {
        const int64_t n = depth - start < kChunk ? depth - start : kChunk;
        const int* tile = packed + start * kRows;
        for (int64_t i = 0; i < lines && ahead.next < ahead.end; ++i, ahead.next += kLine) __builtin_prefetch(ahead.next, 0, 2);
        for (int64_t j = 0; j < n; ++j, codes += kPanels) {
          const __m512i first = codes[0], second = codes[1];
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const __m512i pair = _mm512_set1_epi32(tile[r * kChunk + j]);
            add_products(pair, first, sum[r][0]);
            add_products(pair, second, sum[r][1]);
          }
        }
      }
      const __m512 half[kPanels] = {_mm512_loadu_ps(half_squares + block * kLanes),
                                    _mm512_loadu_ps(half_squares + block * kLanes + kWidth)};
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const __m512 units_of_product = _mm512_set1_ps(units[r] * unit);
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          const __m512 score = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), units_of_product, half[p]);
          _mm512_storeu_ps(scores[r] + (block - begin) * kLanes + p * kWidth, score);
          lowest[r] = _mm512_min_ps(score, lowest[r]);
        }
      }
    }
    for (int r = 0; r < count; ++r) {
      out.best[r] = _mm512_reduce_min_ps(lowest[r]);
      const __m512 limit = _mm512_set1_ps(out.best[r] + out.margin[r]);
      for (int k = 0; k < (end - begin) * kLanes; k += kLanes) {
        const __mmask16 low = _mm512_cmp_ps_mask(_mm512_loadu_ps(scores[r] + k), limit, _CMP_LE_OQ);
        const __mmask16 high = _mm512_cmp_ps_mask(_mm512_loadu_ps(scores[r] + k + kWidth), limit, _CMP_LE_OQ);
        if (__builtin_expect(_kortestz_mask16_u8(low, high), 1)) continue;
        for (uint32_t close = low | static_cast<uint32_t>(high) << kWidth; close; close &= close - 1) {
          const int i = k + __builtin_ctz(close);
          note(out, r, static_cast<int>(begin) * kLanes + i, scores[r][i]);
        }
      }
    }
  }
}

}  // namespace

const CoarseKernel vq_assign_coarse_avx512vnni{
    Arithmetic::i16, kRows, kLanes, tile_bytes, block_bytes, kRows * kChunkBlocks * kLanes * 4, pack, load, candidates, score_few};

}  // namespace uefl::cpu
#endif
