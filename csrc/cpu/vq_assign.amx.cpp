// The search on AMX: tiles of 16 x 32 bfloat16, multiplied into 16 x 16 sums in float32.
//
// Rows and codewords are split into two bfloat16 each (common/certificate.h). Codewords are the left operand, rows the right one, so
// the scores of a codeword lie side by side and each vector lane keeps the best and second best of one row: no reduction at the end,
// and the six vectors of 32 rows stay in registers. The price, turning the rows into columns, is paid once per row.
#if defined(__x86_64__)
// GCC 12 warns about the deliberately undefined operands in its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int kTile = 16;                 // rows of a tile, and 32-bit columns
constexpr int kPair = 2 * kTile;          // rows, and codewords, multiplied together: two tiles by two
constexpr int kGroups = 6;                // pairs of tiles of rows that share one sweep over the codewords
constexpr int64_t kDepth = 32;            // elements in one tile
constexpr int64_t kTileBytes = 1024;      // [16][32] bfloat16
constexpr int64_t kSweepBytes = 1 << 19;  // codewords that stay in the second-level cache while all rows of a tile pass

// One part (the bfloat16 nearest to the values, or nearest to what that leaves) of 32 rows or codewords: [depth][2] tiles.
inline int64_t part_bytes(int64_t d) { return (d + kDepth - 1) / kDepth * 2 * kTileBytes; }

int64_t block_bytes(int64_t d) { return 2 * part_bytes(d); }
int64_t tile_bytes(int64_t count, int64_t d) { return (count + kPair - 1) / kPair * 2 * part_bytes(d); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const TileConfig kConfig;  // in memory for good: the compiler does not see that the instruction reads all of it

struct ConfiguredTiles {
  ConfiguredTiles() { _tile_loadconfig(&kConfig); }
  ~ConfiguredTiles() { _tile_release(); }  // or every later switch of threads saves 8 KiB
};

// The bfloat16 nearest to each of 32 values, ties away from zero, and the one nearest to what that leaves. Element j shares a word with
// element j + 16, which rows and codewords agree on: so packing takes no shuffle.
struct Split {
  __m512i first, second;
  __m512 rest[2];  // value - first
};

inline __attribute__((always_inline)) void split(const __m512 (&value)[2], Split& out) {
  const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const auto round = [&](__m512 v) __attribute__((always_inline)) { return _mm512_add_epi32(_mm512_castps_si512(v), half); };
  // low half of the word from a, high half from b
  const auto pair = [&](__m512i a, __m512i b)
                        __attribute__((always_inline)) { return _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, high, 0xf8); };
  const __m512i nearest[2] = {round(value[0]), round(value[1])};
  for (int i = 0; i < 2; ++i) out.rest[i] = _mm512_sub_ps(value[i], _mm512_castsi512_ps(_mm512_and_si512(nearest[i], high)));
  out.first = pair(nearest[0], nearest[1]);
  out.second = pair(round(out.rest[0]), round(out.rest[1]));
}

// Codewords lie in a tile as they are: [16][16 words].
double pack(const float* code, int64_t d, int64_t lane, void* block) {
  char* target = static_cast<char*>(block) + lane / kTile * kTileBytes + lane % kTile * 64;
  __m512d squares = _mm512_setzero_pd();  // in float64, where they do not underflow
  for (int64_t start = 0; start < d; start += kDepth, target += 2 * kTileBytes) {
    const int64_t n = d - start < kDepth ? d - start : kDepth;
    const uint32_t mask = 0xffffffffu >> (kDepth - n);
    const __m512 value[2] = {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), code + start),
                             _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), code + start + kTile)};
    Split parts;
    split(value, parts);
    _mm512_store_si512(target, parts.first);
    _mm512_store_si512(target + part_bytes(d), parts.second);
    for (const __m512 rest : parts.rest) {
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(rest)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(rest, 1));
      squares = _mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, squares));
    }
  }
  return _mm512_reduce_add_pd(squares);
}

// [16][16] of 32 bits, rows to columns.
inline __attribute__((always_inline)) void transpose(const void* source, int64_t stride, void* target, int64_t target_stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const char*>(source) + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88), b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88), a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(static_cast<char*>(target) + i * target_stride, a[i]);
}

// Float32 sums of d squares are too small by less than 1 % and what underflowed.
inline double square_bound(double sum, int64_t d) { return 1.01 * sum + static_cast<double>(d) * 0x1p-125; }

// Rows lie in a tile as columns: [16 words][16 rows]. A row is read in one go, for the sake of the prefetcher, then columns are formed.
template <class T>
void load_columns(const char* const* source, int64_t count, int64_t stride, int64_t d, const float* mean, char* y, RowSize* size) {
  constexpr int64_t kSlab = 512;
  alignas(64) __m512i parts[2][kTile][kSlab / kDepth + 1];  // one more: rows a power of two apart would share sets of the cache
  alignas(64) float chunk[kTile][kChunk];
  double square[kTile] = {}, left[kTile] = {};
  for (int64_t slab = 0; slab < d; slab += kSlab) {
    const int64_t end = d - slab < kSlab ? d - slab : kSlab;
    const auto convert = [&](int r, int64_t from, int64_t to, const auto& value_at) __attribute__((always_inline)) {
      __m512 sum = _mm512_setzero_ps(), rest = _mm512_setzero_ps();
      for (int64_t j = from; j < to; j += kDepth) {
        const __m512 value[2] = {value_at(j, 0), value_at(j, 1)};
        Split both;
        split(value, both);
        parts[0][r][j / kDepth] = both.first;
        parts[1][r][j / kDepth] = both.second;
        sum = _mm512_fmadd_ps(value[1], value[1], _mm512_fmadd_ps(value[0], value[0], sum));
        rest = _mm512_fmadd_ps(both.rest[1], both.rest[1], _mm512_fmadd_ps(both.rest[0], both.rest[0], rest));
      }
      square[r] += _mm512_reduce_add_ps(sum);
      left[r] += _mm512_reduce_add_ps(rest);
    };
    if (sizeof(T) == sizeof(float) && stride == 1) {
      for (int r = 0; r < kTile; ++r) {
        const float* row = reinterpret_cast<const float*>(source[r < count ? r : count - 1]) + slab;
        convert(r, 0, end, [&](int64_t j, int i) __attribute__((always_inline)) {
          const int64_t at = j + i * kTile;
          if (at + kTile <= end) return _mm512_sub_ps(_mm512_loadu_ps(row + at), _mm512_loadu_ps(mean + slab + at));
          const __mmask16 mask = at < end ? static_cast<__mmask16>(0xffff >> (at + kTile - end)) : 0;
          return _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, row + at), _mm512_maskz_loadu_ps(mask, mean + slab + at));
        });
      }
    } else {
      for (int64_t start = 0; start < end; start += kChunk) {
        load_chunk<T, kTile, kDepth>(source, count, stride, slab + start, d, mean, chunk[0]);
        for (int r = 0; r < kTile; ++r) {
          convert(r, start, end - start < kChunk ? end : start + kChunk,
                  [&](int64_t j, int i) __attribute__((always_inline)) { return _mm512_load_ps(chunk[r] + j - start + i * kTile); });
        }
      }
    }
    for (int64_t j = 0; j < end; j += kDepth) {
      char* target = y + (slab + j) / kDepth * 2 * kTileBytes;
      transpose(&parts[0][0][j / kDepth], sizeof parts[0][0], target, 64);
      transpose(&parts[1][0][j / kDepth], sizeof parts[1][0], target + part_bytes(d), 64);
    }
  }
  for (int r = 0; r < kTile && r < count; ++r) size[r] = {square_bound(square[r], d), square_bound(left[r], d)};
}

void load(const char* const* source, int64_t count, Dtype dtype, int64_t stride, int64_t d, const float* mean, void* y, RowSize* size) {
  char* tile = static_cast<char*>(y);
  with_type(dtype, [&]<class T>(const T*) {
    for (int64_t r = 0; r < (count + kPair - 1) / kPair * kPair; r += kTile) {
      const int64_t from = r < count ? r : count - 1;  // a second tile without rows repeats the last one
      RowSize unused[kTile];
      load_columns<T>(source + from, count - from, stride, d, mean, tile + r / kPair * 2 * part_bytes(d) + r / kTile % 2 * kTileBytes,
                      r < count ? size + r : unused);
    }
  });
}

// Tiles 0 to 3 += the 32 codewords of tiles 4 and 5 times the 32 rows of tiles 6 and 7.
inline __attribute__((always_inline)) void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// 32 codewords times 32 rows, on their way to the scores.
struct alignas(64) Sums {
  float product[kPair][2][kTile];

  // The sums of all products. between() is called after every four of them. Eight loads for twelve products: from the second-level
  // cache, where long codewords come from, a tile takes longer than a product.
  template <class Between>
  inline __attribute__((always_inline)) void multiply(const char* codes, const char* y, int64_t part, const Between& between) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < part; i += 2 * kTileBytes) {
      _tile_loadd(4, codes + i, 64);
      _tile_loadd(5, codes + i + kTileBytes, 64);
      _tile_loadd(6, y + part + i, 64);
      _tile_loadd(7, y + part + i + kTileBytes, 64);
      add_products();
      between();
      _tile_loadd(6, y + i, 64);
      _tile_loadd(7, y + i + kTileBytes, 64);
      add_products();
      between();
      _tile_loadd(4, codes + part + i, 64);
      _tile_loadd(5, codes + part + i + kTileBytes, 64);
      add_products();
      between();
    }
    _tile_stored(0, product[0][0], sizeof product[0]);
    _tile_stored(1, product[0][1], sizeof product[0]);
    _tile_stored(2, product[kTile][0], sizeof product[0]);
    _tile_stored(3, product[kTile][1], sizeof product[0]);
  }
  // Scores of codeword k with 16 rows.
  inline __attribute__((always_inline)) __m512 score(int k, int half, const float* half_squares) const {
    return _mm512_sub_ps(_mm512_set1_ps(half_squares[k]), _mm512_load_ps(product[k][half]));
  }
};

struct TopTwo {
  __m512 best[2], second[2];
  __m512i index[2];
};

// Scores that wait for their comparisons.
struct Pending {
  const Sums* sums;
  const float* half_squares;
  TopTwo* top;
  int code;  // the first one
};

// The tile unit takes one of the two vector ports, so comparisons are free among products, and not after them: those of one block of
// scores are handed out in portions, one after every few products of the next block.
class Comparisons {
 public:
  inline __attribute__((always_inline)) explicit Comparisons(const Pending& pending) : from_(pending), top_(*pending.top) {}
  inline __attribute__((always_inline)) void until(int k) {
    for (; done_ < k; ++done_) {
      const __m512i code = _mm512_set1_epi32(from_.code + done_);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512 s = from_.sums->score(done_, i, from_.half_squares);
        top_.index[i] = _mm512_mask_mov_epi32(top_.index[i], _mm512_cmp_ps_mask(s, top_.best[i], _CMP_LT_OQ), code);
        top_.second[i] = _mm512_min_ps(_mm512_max_ps(s, top_.best[i]), top_.second[i]);
        top_.best[i] = _mm512_min_ps(s, top_.best[i]);
      }
    }
  }
  inline __attribute__((always_inline)) void finish() {
    until(kPair);
    *from_.top = top_;
  }

 private:
  const Pending from_;
  TopTwo top_;
  int done_ = 0;
};

void top_two(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, Ahead ahead,
             float* best, float* second, int64_t* index) {
  const ConfiguredTiles configured;
  const int64_t part = part_bytes(d), groups = (count + kPair - 1) / kPair;
  const int64_t sweep = kSweepBytes / (2 * part) + 1;
  const int64_t steps = 3 * part / (2 * kTileBytes);                                    // of four products, in a block
  const int64_t bytes = (ahead.end - ahead.next + 63) / (steps * blocks * groups) + 1;  // to ask for in a step
  const int rate = static_cast<int>((int64_t{kPair} << 16) / steps) + 1;                // codewords to compare in a step, in 2^-16
  TopTwo tops[kGroups], nowhere;
  for (TopTwo& top : tops) {
    for (int i = 0; i < 2; ++i) {
      top.best[i] = top.second[i] = _mm512_set1_ps(__builtin_inff());
      top.index[i] = _mm512_setzero_si512();
    }
  }
  nowhere = tops[0];
  Sums sums[2] = {};
  Pending pending{&sums[1], half_squares, &nowhere, 0};
  const char* line = ahead.next;
  int turn = 0;
  for (int64_t begin = 0; begin < blocks; begin += sweep) {
    const int64_t end = begin + sweep < blocks ? begin + sweep : blocks;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t block = begin; block < end; ++block, turn ^= 1) {
        Comparisons comparisons(pending);
        int progress = 0;
        const auto between = [&]() __attribute__((always_inline)) {
          for (ahead.next += bytes; line < ahead.next && line < ahead.end; line += 64) _mm_prefetch(line, _MM_HINT_T1);
          progress += rate;
          comparisons.until(progress >> 16 < kPair ? progress >> 16 : kPair);
        };
        sums[turn].multiply(static_cast<const char*>(panels) + block * 2 * part, static_cast<const char*>(y) + g * 2 * part, part, between);
        comparisons.finish();
        pending = {&sums[turn], half_squares + block * kPair, &tops[g], static_cast<int>(block) * kPair};
      }
    }
  }
  Comparisons(pending).finish();
  for (int64_t r = 0; r < count; ++r) {
    const TopTwo& top = tops[r / kPair];
    const int64_t i = r / kTile % 2, lane = r % kTile;
    best[r] = top.best[i][lane];
    second[r] = top.second[i][lane];
    index[r] = reinterpret_cast<const int*>(&top.index[i])[lane];
  }
}

void scores(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks, int64_t d, float* out) {
  const ConfiguredTiles configured;
  const int64_t part = part_bytes(d), width = blocks * kPair;
  Sums sums;
  alignas(64) float columns[kTile][kTile], rows[kTile][kTile];
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t first = 0; first < count; first += kPair) {
      sums.multiply(static_cast<const char*>(panels) + block * 2 * part, static_cast<const char*>(y) + first / kPair * 2 * part, part,
                    [] {});
      for (int i = 0; i < 4; ++i) {
        const int64_t row = first + i % 2 * kTile, code = block * kPair + i / 2 * kTile;
        for (int k = 0; k < kTile; ++k) _mm512_store_ps(columns[k], sums.score(i / 2 * kTile + k, i % 2, half_squares + block * kPair));
        transpose(columns, 64, rows, 64);
        for (int64_t r = 0; r < kTile && row + r < count; ++r) __builtin_memcpy(out + (row + r) * width + code, rows[r], sizeof rows[r]);
      }
    }
  }
}

}  // namespace

const VqAssignKernel vq_assign_amx{Arithmetic::bf16x3, kGroups * kPair, kPair, tile_bytes, block_bytes, pack, load, top_two, scores};

}  // namespace uefl::cpu
#endif
