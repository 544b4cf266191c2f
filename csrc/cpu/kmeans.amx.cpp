// Distances between integer rows with AMX. Each number is 256 * high + low, with two signed digits of 8 bits.
// Products of digits are summed in 32-bit integers, without rounding. A tile holds the high and the low
// digits of eight candidates, so two tile products give all four products of digits.
#if defined(__x86_64__)
#include "cpu/amx.h"
#include "cpu/kmeans_seeding_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kTile = 16;   // rows of a tile
constexpr int64_t kDepth = 64;  // bytes of a tile row: elements that one instruction multiplies
constexpr int64_t kTileBytes = kTile * kDepth;

inline int64_t padded(int64_t d) { return (d + kDepth - 1) / kDepth * kDepth; }

// Returns the bytes of a row. 16 rows have, for each 64 elements, a row-major tile of their high digits, then
// a tile of their low digits. A group of candidates has, for each 64 elements, a tile [16 runs of 4
// elements][16 columns][4]. Columns 0 to 7 hold the high digits of the candidates, and columns 8 to 15 the
// low digits.
int64_t row_bytes(int64_t d) { return 2 * padded(d); }
int64_t group_bytes(int64_t d) { return padded(d) / kDepth * kTileBytes; }

// Returns the offset of the high digit of element j of a row. The low digit is one tile later.
inline int64_t place(int64_t row, int64_t d, int64_t j) {
  return row / kTile * kTile * row_bytes(d) + j / kDepth * 2 * kTileBytes + row % kTile * kDepth + j % kDepth;
}

inline int8_t low_digit(int16_t value) { return static_cast<int8_t>(value); }
inline int8_t high_digit(int16_t value) { return static_cast<int8_t>((value - low_digit(value)) >> 8); }

void store(const int16_t* values, int64_t d, int64_t row, char* rows) {
  for (int64_t start = 0; start < d; start += kDepth) {
    int8_t* high = reinterpret_cast<int8_t*>(rows + place(row, d, start));
    int8_t* low = high + kTileBytes;
    const int64_t n = d - start < kDepth ? d - start : kDepth;
    for (int64_t j = 0; j < n; ++j)
      high[j] = high_digit(values[start + j]), low[j] = low_digit(values[start + j]);
    for (int64_t j = n; j < kDepth; ++j) high[j] = low[j] = 0;
  }
}

void load(const char* rows, int64_t d, int64_t row, int16_t* values) {
  for (int64_t j = 0; j < d; ++j) {
    const int8_t* high = reinterpret_cast<const int8_t*>(rows + place(row, d, j));
    values[j] = static_cast<int16_t>(high[0] * 256 + high[kTileBytes]);
  }
}

void pack(const int16_t* values, int64_t d, int64_t lane, char* group) {
  for (int64_t j = 0; j < d; ++j) {
    int8_t* target = reinterpret_cast<int8_t*>(group + j / 4 * kDepth + lane * 4 + j % 4);
    target[0] = high_digit(values[j]);
    target[kGroup * 4] = low_digit(values[j]);
  }
}

// The products of the high and of the low digits of 16 rows with the columns of a group.
struct alignas(64) DigitProducts {
  int32_t high[kTile][kTile], low[kTile][kTile];
};

// Returns the products of row i and each candidate: 65536 high.high + 256 (high.low + low.high) + low.low.
inline __attribute__((always_inline)) __m512i combine(const DigitProducts& products, int64_t i) {
  const __m512i high = _mm512_load_si512(products.high[i]), low = _mm512_load_si512(products.low[i]);
  const __m512i high_high = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(high));
  const __m512i high_low = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(high, 1));
  const __m512i low_high = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(low));
  const __m512i low_low = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(low, 1));
  const __m512i mixed = _mm512_add_epi64(high_low, low_high);
  return _mm512_add_epi64(_mm512_add_epi64(_mm512_slli_epi64(high_high, 16), _mm512_slli_epi64(mixed, 8)),
                          low_low);
}

void distances(const char* rows, const int64_t* norms, int64_t first_row, int64_t count, int64_t d, int64_t,
               const char* group, const int64_t* group_norms, int64_t candidates, int64_t* const* out) {
  const ConfiguredTiles configured;
  const int64_t bytes = kTile * row_bytes(d);
  const __m512i candidate_norms = _mm512_loadu_si512(group_norms);
  DigitProducts products[2];
  for (int64_t start = 0; start < count; start += 2 * kTile) {
    // If there is no second tile of rows, the first one is used twice.
    const char* first = rows + first_row * row_bytes(d) + start / kTile * bytes;
    const char* second = start + kTile < count ? first + bytes : first;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < bytes; j += 2 * kTileBytes) {
      _tile_loadd(6, group + j / 2, kDepth);
      _tile_loadd(4, first + j, kDepth);
      _tile_loadd(5, first + j + kTileBytes, kDepth);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
      _tile_loadd(4, second + j, kDepth);
      _tile_loadd(5, second + j + kTileBytes, kDepth);
      _tile_dpbssd(2, 4, 6);
      _tile_dpbssd(3, 5, 6);
    }
    _tile_stored(0, products[0].high, kDepth);
    _tile_stored(1, products[0].low, kDepth);
    _tile_stored(2, products[1].high, kDepth);
    _tile_stored(3, products[1].low, kDepth);
    for (int64_t i = start; i < count && i < start + 2 * kTile; ++i) {
      const __m512i product = combine(products[(i - start) / kTile], (i - start) % kTile);
      const __m512i norm = _mm512_add_epi64(_mm512_set1_epi64(norms[first_row + i]), candidate_norms);
      alignas(64) int64_t distances[kGroup];
      _mm512_store_si512(distances, _mm512_sub_epi64(norm, _mm512_slli_epi64(product, 1)));
      for (int64_t c = 0; c < candidates; ++c) out[c][i] = distances[c];
    }
  }
}

}  // namespace

const SeedingKernel seeding_amx{row_bytes, group_bytes, store, load, pack, distances};

}  // namespace uefl::cpu
#endif
