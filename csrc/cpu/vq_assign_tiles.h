// Rows and codewords as tiles of AMX: 16 x 32 bfloat16. They have two parts for three products
// (vq_assign.amx.cpp) or only the first part for one product (vq_prefilter.amx.cpp).
#pragma once

#include "cpu/amx.h"
#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int kTile = 16;             // rows of a tile, and 32-bit columns
constexpr int kPair = 2 * kTile;      // rows, and codewords, multiplied together: two tiles by two
constexpr int64_t kDepth = 32;        // elements in one tile
constexpr int64_t kTileBytes = 1024;  // [16][32] bfloat16

// Returns the bytes of one part of 32 rows or codewords, [depth][2] tiles. A part is the nearest bfloat16, or
// the nearest bfloat16 to the rest.
inline int64_t part_bytes(int64_t d) { return (d + kDepth - 1) / kDepth * 2 * kTileBytes; }

// Returns the bytes of 32 codewords, or of a tile of rows, with kParts parts each.
template <int kParts>
int64_t block_bytes(int64_t d) {
  return kParts * part_bytes(d);
}
template <int kParts>
int64_t tile_bytes(int64_t count, int64_t d) {
  return (count + kPair - 1) / kPair * kParts * part_bytes(d);
}

// The bfloat16 nearest to each of 32 values, with ties away from zero, and the bfloat16 nearest to the rest.
// Element j shares a word with element j + 16, in rows and codewords alike, so packing needs no shuffle.
struct SplitFloats {
  __m512i first, second;
  __m512 rest[2];  // value - first
};

// Returns the bfloat16 nearest to each value, in the high half of its word. The low half is undefined.
inline __attribute__((always_inline)) __m512i nearest(__m512 value) {
  return _mm512_add_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(0x8000));
}

// Returns the rest of a value after nearest().
inline __attribute__((always_inline)) __m512 rest_of(__m512 value, __m512i rounded) {
  return _mm512_sub_ps(
      value, _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000)))));
}

// Returns words of two bfloat16: the low half from `low`, the high half from `high`.
inline __attribute__((always_inline)) __m512i words(__m512i low, __m512i high) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, 16), high,
                                   _mm512_set1_epi32(static_cast<int>(0xffff0000)), 0xf8);
}

inline __attribute__((always_inline)) void split(const __m512 (&value)[2], SplitFloats& out) {
  const __m512i first[2] = {nearest(value[0]), nearest(value[1])};
  for (int i = 0; i < 2; ++i) out.rest[i] = rest_of(value[i], first[i]);
  out.first = words(first[0], first[1]);
  out.second = words(nearest(out.rest[0]), nearest(out.rest[1]));
}

// Packs a codeword. Codewords keep their order in a tile: [16][16 words].
template <int kParts>
double pack(const float* code, int64_t d, int64_t lane, void* block) {
  char* target = static_cast<char*>(block) + lane / kTile * kTileBytes + lane % kTile * 64;
  __m512d squares = _mm512_setzero_pd();  // float64, so that squares do not underflow
  for (int64_t start = 0; start < d; start += kDepth, target += 2 * kTileBytes) {
    const int64_t n = d - start < kDepth ? d - start : kDepth;
    const uint32_t mask = 0xffffffffu >> (kDepth - n);
    const __m512 value[2] = {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), code + start),
                             _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), code + start + kTile)};
    SplitFloats parts;
    split(value, parts);
    _mm512_store_si512(target, parts.first);
    if (kParts == 2) _mm512_store_si512(target + part_bytes(d), parts.second);
    for (const __m512 rest : parts.rest) {
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(rest)),
                    high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(rest, 1));
      squares = _mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, squares));
    }
  }
  return _mm512_reduce_add_pd(squares);
}

// Transposes [16][16] words of 32 bits.
inline __attribute__((always_inline)) void transpose(const void* source, int64_t stride, void* target,
                                                     int64_t target_stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const char*>(source) + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2)
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]),
          a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88),
          b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88), a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(static_cast<char*>(target) + i * target_stride, a[i]);
}

// Packs rows, which are columns of a tile: [16 words][16 rows]. A row is first read in one go, which suits
// the hardware prefetcher. Then the columns are formed.
template <class T, int kParts>
void load_columns(const char* const* source, int64_t count, int64_t d, const float* mean, char* y,
                  RowSize* size) {
  constexpr int64_t kSlab = 512;
  alignas(64) __m512i parts[kParts][kTile][kSlab / kDepth + 1];  // one more, because rows a power of two
                                                                 // apart would share sets of the cache
  alignas(64) float chunk[kTile][kChunk];
  double square[kTile] = {}, left[kTile] = {};
  for (int64_t slab = 0; slab < d; slab += kSlab) {
    const int64_t end = d - slab < kSlab ? d - slab : kSlab;
    const auto convert = [&](int r, int64_t from, int64_t to,
                             const auto& value_at) __attribute__((always_inline)) {
      __m512 sum = _mm512_setzero_ps(), rest = _mm512_setzero_ps();
      for (int64_t j = from; j < to; j += kDepth) {
        const __m512 value[2] = {value_at(j, 0), value_at(j, 1)};
        SplitFloats both;
        split(value, both);
        parts[0][r][j / kDepth] = both.first;
        if (kParts == 2) parts[1][r][j / kDepth] = both.second;
        sum = _mm512_fmadd_ps(value[1], value[1], _mm512_fmadd_ps(value[0], value[0], sum));
        rest = _mm512_fmadd_ps(both.rest[1], both.rest[1], _mm512_fmadd_ps(both.rest[0], both.rest[0], rest));
      }
      square[r] += _mm512_reduce_add_ps(sum);
      left[r] += _mm512_reduce_add_ps(rest);
    };
    if (sizeof(T) == sizeof(float)) {
      for (int r = 0; r < kTile; ++r) {
        const float* row = reinterpret_cast<const float*>(source[r < count ? r : count - 1]) + slab;
        convert(r, 0, end, [&](int64_t j, int i) __attribute__((always_inline)) {
          const int64_t at = j + i * kTile;
          if (at + kTile <= end)
            return _mm512_sub_ps(_mm512_loadu_ps(row + at), _mm512_loadu_ps(mean + slab + at));
          const __mmask16 mask = at < end ? static_cast<__mmask16>(0xffff >> (at + kTile - end)) : 0;
          return _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, row + at),
                                     _mm512_maskz_loadu_ps(mask, mean + slab + at));
        });
      }
    } else {
      for (int64_t start = 0; start < end; start += kChunk) {
        load_chunk<T, kTile, kDepth>(source, count, slab + start, d, mean, chunk[0]);
        for (int r = 0; r < kTile; ++r) {
          convert(r, start, end - start < kChunk ? end : start + kChunk,
                  [&](int64_t j, int i) __attribute__((always_inline)) {
                    return _mm512_load_ps(chunk[r] + j - start + i * kTile);
                  });
        }
      }
    }
    for (int64_t j = 0; j < end; j += kDepth) {
      char* target = y + (slab + j) / kDepth * 2 * kTileBytes;
      for (int part = 0; part < kParts; ++part, target += part_bytes(d)) {
        transpose(&parts[part][0][j / kDepth], sizeof parts[part][0], target, 64);
      }
    }
  }
  for (int r = 0; r < kTile && r < count; ++r)
    size[r] = {square_bound(square[r], d), square_bound(left[r], d)};
}

template <int kParts>
void load(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y,
          RowSize* size) {
  char* tile = static_cast<char*>(y);
  with_type(dtype, [&]<class T>(const T*) {
    for (int64_t r = 0; r < (count + kPair - 1) / kPair * kPair; r += kTile) {
      const int64_t from = r < count ? r : count - 1;  // a second tile without rows repeats the last row
      RowSize unused[kTile];
      load_columns<T, kParts>(source + from, count - from, d, mean,
                              tile + r / kPair * kParts * part_bytes(d) + r / kTile % 2 * kTileBytes,
                              r < count ? size + r : unused);
    }
  });
}

// The products of 32 codewords and 32 rows. They are summed in tiles 0 to 3, and then stored in memory for
// the scores.
struct alignas(64) Products {
  float value[kPair][2][kTile];

  static inline __attribute__((always_inline)) void begin() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  // Adds the products of the codewords of tiles 4 and 5 and the rows of tiles 6 and 7.
  static inline __attribute__((always_inline)) void add() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  inline __attribute__((always_inline)) void end() {
    _tile_stored(0, value[0][0], sizeof value[0]);
    _tile_stored(1, value[0][1], sizeof value[0]);
    _tile_stored(2, value[kTile][0], sizeof value[0]);
    _tile_stored(3, value[kTile][1], sizeof value[0]);
  }
  // Returns the scores of codeword k with 16 rows.
  inline __attribute__((always_inline)) __m512 score(int k, int half, const float* half_squares) const {
    return _mm512_sub_ps(_mm512_set1_ps(half_squares[k]), _mm512_load_ps(value[k][half]));
  }
};

}  // namespace
}  // namespace uefl::cpu
