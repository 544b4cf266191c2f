// Distances between rows of whole numbers on AVX-512: a candidate is 256 * high + low, both of 8 bits, and the products of pairs of
// elements are summed in 32 bits without rounding. Eight candidates fill a vector, their high digits beside their low ones.
// With VNNI an instruction multiplies and adds, without it takes two.
#pragma once

// GCC 12 warns about the deliberately undefined operands in its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu/kmeans_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kTile = 16;   // rows that share a load of the candidates
constexpr int64_t kLine = 32;   // elements of a row that lie side by side
constexpr int64_t kSums = 512;  // elements whose products fit in 32 bits: 256 pairs of at most 2^22
constexpr int64_t kPair = 4;    // bytes of two elements

inline int64_t line_padded(int64_t d) { return (d + kLine - 1) / kLine * kLine; }

// 16 rows: [runs of 32 elements][16 rows][32]. A group: [pairs of elements][high digits of 8, low digits of 8][2].
int64_t digits_row_bytes(int64_t d) { return line_padded(d) * 2; }
int64_t digits_group_bytes(int64_t d) { return line_padded(d) / 2 * 2 * kGroup * kPair; }

inline int64_t place(int64_t row, int64_t d, int64_t j) {
  return row / kTile * kTile * line_padded(d) + j / kLine * kTile * kLine + row % kTile * kLine + j % kLine;
}

void digits_store(const int16_t* values, int64_t d, int64_t row, char* rows) {
  for (int64_t start = 0; start < d; start += kLine) {
    int16_t* target = reinterpret_cast<int16_t*>(rows) + place(row, d, start);
    const int64_t n = d - start < kLine ? d - start : kLine;
    for (int64_t j = 0; j < n; ++j) target[j] = values[start + j];
    for (int64_t j = n; j < kLine; ++j) target[j] = 0;
  }
}

void digits_load(const char* rows, int64_t d, int64_t row, int16_t* values) {
  for (int64_t j = 0; j < d; ++j) values[j] = reinterpret_cast<const int16_t*>(rows)[place(row, d, j)];
}

void digits_pack(const int16_t* values, int64_t d, int64_t lane, char* group) {
  for (int64_t j = 0; j < d; ++j) {
    int16_t* target = reinterpret_cast<int16_t*>(group) + (j / 2 * 2 * kGroup + lane) * 2 + j % 2;
    const int8_t low = static_cast<int8_t>(values[j]);
    target[0] = static_cast<int16_t>((values[j] - low) / 256);
    target[2 * kGroup] = low;
  }
}

inline __attribute__((always_inline)) void add_products(__m512i a, __m512i b, __m512i& sum) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // GCC 12 copies the sums around the intrinsic
#else
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

void digits_distances(const char* rows, const int64_t* norms, int64_t first, int64_t count, int64_t d, const char* group,
                      const int64_t* group_norms, int64_t* distances) {
  const int64_t depth = line_padded(d);
  const __m512i others = _mm512_loadu_si512(group_norms);
  for (int64_t start = 0; start < count; start += kTile) {
    const int64_t n = count - start < kTile ? count - start : kTile;
    const char* tile = rows + (first + start) * digits_row_bytes(d);
    const __m512i* candidates = reinterpret_cast<const __m512i*>(group);
    __m512i products[kTile];
    for (int64_t r = 0; r < kTile; ++r) products[r] = _mm512_setzero_si512();
    for (int64_t done = 0; done < depth; done += kSums) {
      const int64_t end = depth - done < kSums ? depth : done + kSums;
      __m512i sums[kTile];
#pragma GCC unroll 16
      for (int r = 0; r < kTile; ++r) sums[r] = _mm512_setzero_si512();
      for (int64_t j = done; j < end; j += kLine, tile += kTile * kLine * 2) {
        for (int64_t w = 0; w < kLine / 2; ++w, ++candidates) {
          const __m512i digits = *candidates;
#pragma GCC unroll 16
          for (int r = 0; r < kTile; ++r) {
            int pair;
            __builtin_memcpy(&pair, tile + r * kLine * 2 + w * kPair, kPair);
            add_products(digits, _mm512_set1_epi32(pair), sums[r]);
          }
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kTile; ++r) {
        const __m512i high = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(sums[r]));
        const __m512i low = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(sums[r], 1));
        products[r] = _mm512_add_epi64(products[r], _mm512_add_epi64(_mm512_slli_epi64(high, 8), low));
      }
    }
    for (int64_t r = 0; r < n; ++r) {
      const __m512i norm = _mm512_add_epi64(_mm512_set1_epi64(norms[first + start + r]), others);
      _mm512_storeu_si512(distances + (start + r) * kGroup, _mm512_sub_epi64(norm, _mm512_slli_epi64(products[r], 1)));
    }
  }
}

constexpr GridKernel kDigits{digits_row_bytes, digits_group_bytes, digits_store, digits_load, digits_pack, digits_distances};

}  // namespace
}  // namespace uefl::cpu
