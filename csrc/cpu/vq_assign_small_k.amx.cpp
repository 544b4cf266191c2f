// The search on AMX among up to 64 codewords, with the same three products as vq_assign.amx.cpp.
//
// The products of 16 rows with all codewords fit into the tile registers, so a row is read once. Rows are the
// left operand, which has the layout of rows in memory. The products are transposed instead of the rows,
// because there are fewer products. While 16 rows are multiplied, the next 16 rows are split one by one. So
// memory is read without a pause, and the vector unit works while the tile unit does.
#if defined(__x86_64__)
#include "cpu/vq_assign_tiles.h"

namespace uefl::cpu {
namespace {

constexpr int kRows = 192;

inline int64_t steps_of(int64_t d) { return (d + kDepth - 1) / kDepth; }

// Returns the bytes of 16 rows: [depth][2 parts] tiles. A tile of rows consists of two such groups: one group
// is multiplied while the other group is filled.
inline int64_t group_bytes(int64_t d) { return steps_of(d) * 2 * kTileBytes; }
int64_t two_groups(int64_t, int64_t d) { return 2 * group_bytes(d); }

// Returns the bytes of 32 codewords as right operands: [depth][2 parts][2] tiles of [16 words][16 codewords].
int64_t small_k_block_bytes(int64_t d) { return steps_of(d) * 4 * kTileBytes; }

double pack_columns(const float* code, int64_t d, int64_t lane, void* block) {
  char* target = static_cast<char*>(block) + lane / kTile * kTileBytes + lane % kTile * 4;
  double squares = 0;
  for (int64_t start = 0; start < d; start += kDepth) {
    alignas(64) char packed[4 * kTileBytes] = {};
    const int64_t n = d - start < kDepth ? d - start : kDepth;
    // Fills one line of two tiles of each part.
    squares += pack<2>(code + start, n, 0, packed);
    for (int part = 0; part < 2; ++part, target += 2 * kTileBytes) {
      for (int w = 0; w < kTile; ++w)
        __builtin_memcpy(target + w * 64, packed + part * part_bytes(n) + w * 4, 4);
    }
  }
  return squares;
}

// Splits 16 rows, one after the other, 32 elements at a time.
template <class T>
class RowSplitter {
 public:
  inline __attribute__((always_inline)) RowSplitter(const char* const* source, int64_t count, int64_t d,
                                                    const float* mean, char* group, RowSize* size)
      : source_(source), count_(count), d_(d), mean_(mean), group_(group), size_(size) {}

  inline __attribute__((always_inline)) void until(int64_t unit) {
    for (; done_ < unit; ++done_) {
      __m512 value[2];
      read(value);
      SplitFloats both;
      split(value, both);
      char* target = group_ + row_ * 64 + start_ / kDepth * 2 * kTileBytes;
      _mm512_store_si512(target, both.first);
      _mm512_store_si512(target + kTileBytes, both.second);
      square_ = _mm512_fmadd_ps(value[1], value[1], _mm512_fmadd_ps(value[0], value[0], square_));
      rest_ = _mm512_fmadd_ps(both.rest[1], both.rest[1], _mm512_fmadd_ps(both.rest[0], both.rest[0], rest_));
      start_ += kDepth;
      if (start_ >= d_) next_row();
    }
  }

 private:
  inline __attribute__((always_inline)) void read(__m512 (&value)[2]) const {
    const T* x = reinterpret_cast<const T*>(source_[row_ < count_ ? row_ : count_ - 1]) + start_;
    const int64_t n = d_ - start_ < kDepth ? d_ - start_ : kDepth;
    if (sizeof(T) == sizeof(float)) {
      const uint32_t mask = 0xffffffffu >> (kDepth - n);
      const __mmask16 half[2] = {static_cast<__mmask16>(mask), static_cast<__mmask16>(mask >> 16)};
      const float* from = reinterpret_cast<const float*>(x);
      for (int i = 0; i < 2; ++i) {
        value[i] = _mm512_maskz_sub_ps(half[i], _mm512_maskz_loadu_ps(half[i], from + i * kTile),
                                       _mm512_maskz_loadu_ps(half[i], mean_ + start_ + i * kTile));
      }
    } else {
      alignas(64) float centered[kDepth] = {};
      for (int64_t j = 0; j < n; ++j) centered[j] = center(x[j], mean_[start_ + j]);
      for (int i = 0; i < 2; ++i) value[i] = _mm512_load_ps(centered + i * kTile);
    }
  }

  inline __attribute__((always_inline)) void next_row() {
    if (row_ < count_)
      size_[row_] = {square_bound(_mm512_reduce_add_ps(square_), d_),
                     square_bound(_mm512_reduce_add_ps(rest_), d_)};
    square_ = rest_ = _mm512_setzero_ps();
    start_ = 0;
    ++row_;
  }

  const char* const* source_;
  int64_t count_, d_;
  const float* mean_;
  char* group_;
  RowSize* size_;
  int64_t done_ = 0, row_ = 0, start_ = 0;
  __m512 square_ = _mm512_setzero_ps(), rest_ = _mm512_setzero_ps();
};

// The products of 16 rows with 16 codewords, in each tile.
struct alignas(64) TileSums {
  float product[4][kTile][kTile];
};

// Adds the products of 16 rows and the 16 codewords of each of 2 * kBlocks tiles to tiles 0 to 3. between()
// runs after every three products.
template <int kBlocks, class Between>
inline __attribute__((always_inline)) void multiply(const char* rows, const char* panels, int64_t d,
                                                    TileSums& sums, const Between& between) {
  asm volatile("" ::: "memory");  // GCC 12 does not know that tile loads read memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps_of(d); ++step) {
    const char* y = rows + step * 2 * kTileBytes;
    const char* codewords = panels + step * 4 * kTileBytes;
    [[maybe_unused]] const char* more = codewords + small_k_block_bytes(d);
    _tile_loadd(4, y, 64);
    _tile_loadd(5, y + kTileBytes, 64);
#define UEFL_THREE_PRODUCTS(sum, codewords)       \
  _tile_loadd(6, codewords, 64);                  \
  _tile_loadd(7, codewords + 2 * kTileBytes, 64); \
  _tile_dpbf16ps(sum, 5, 6);                      \
  _tile_dpbf16ps(sum, 4, 7);                      \
  _tile_dpbf16ps(sum, 4, 6);                      \
  between()
    UEFL_THREE_PRODUCTS(0, codewords);
    UEFL_THREE_PRODUCTS(1, codewords + kTileBytes);
    if constexpr (kBlocks == 2) {
      UEFL_THREE_PRODUCTS(2, more);
      UEFL_THREE_PRODUCTS(3, more + kTileBytes);
    }
#undef UEFL_THREE_PRODUCTS
  }
  _tile_stored(0, sums.product[0], 64);
  _tile_stored(1, sums.product[1], 64);
  if constexpr (kBlocks == 2) {
    _tile_stored(2, sums.product[2], 64);
    _tile_stored(3, sums.product[3], 64);
  }
}

// Finds the best and the second-best score of 16 rows, one row per lane.
template <int kBlocks>
inline void compare(const TileSums& sums, const float* half_squares, int64_t count, float* best,
                    float* second, int64_t* index) {
  __m512 least = _mm512_set1_ps(__builtin_inff()), next = least;
  __m512i code = _mm512_setzero_si512();
  for (int tile = 0; tile < 2 * kBlocks; ++tile) {
    alignas(64) float columns[kTile][kTile];
    transpose(sums.product[tile], 64, columns, 64);
    for (int i = 0; i < kTile; ++i) {
      const int k = tile * kTile + i;
      const __m512 s = _mm512_sub_ps(_mm512_set1_ps(half_squares[k]), _mm512_load_ps(columns[i]));
      code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(s, least, _CMP_LT_OQ), _mm512_set1_epi32(k));
      next = _mm512_min_ps(_mm512_max_ps(s, least), next);
      least = _mm512_min_ps(s, least);
    }
  }
  alignas(64) float values[2][kTile];
  alignas(64) int codes[kTile];
  _mm512_store_ps(values[0], least);
  _mm512_store_ps(values[1], next);
  _mm512_store_si512(codes, code);
  for (int64_t r = 0; r < count; ++r) best[r] = values[0][r], second[r] = values[1][r], index[r] = codes[r];
}

template <class T, int kBlocks>
void load_top_two_typed(const char* const* source, int64_t count, int64_t d, const float* mean, char* y,
                        RowSize* size, const char* panels, const float* half_squares, float* best,
                        float* second, int64_t* index) {
  const int64_t units = kTile * steps_of(d);
  constexpr int kPortion = kTile / (2 * kBlocks);
  TileSums sums;
  RowSplitter<T>(source, count, d, mean, y, size).until(units);
  for (int64_t first = 0, current = 0; first < count; first += kTile, current ^= 1) {
    const int64_t following = first + kTile;
    RowSplitter<T> splitter(source + following, count - following, d, mean,
                            y + (current ^ 1) * group_bytes(d), size + following);
    int64_t unit = 0;
    const int64_t portion = following < count ? kPortion : 0;
    multiply<kBlocks>(y + current * group_bytes(d), panels, d, sums,
                      [&]() __attribute__((always_inline)) { splitter.until(unit += portion); });
    compare<kBlocks>(sums, half_squares, count - first < kTile ? count - first : kTile, best + first,
                     second + first, index + first);
  }
}

void load_top_two(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean,
                  void* y, RowSize* size, const void* panels, const float* half_squares, int64_t blocks,
                  float* best, float* second, int64_t* index) {
  const ConfiguredTiles configured;
  with_type(dtype, [&]<class T>(const T*) {
    const auto search = blocks == 1 ? load_top_two_typed<T, 1> : load_top_two_typed<T, 2>;
    search(source, count, d, mean, static_cast<char*>(y), size, static_cast<const char*>(panels),
           half_squares, best, second, index);
  });
}

void load_groups(const char* const* source, int64_t count, Dtype dtype, int64_t d, const float* mean, void* y,
                 RowSize* size) {
  with_type(dtype, [&]<class T>(const T*) {
    for (int64_t first = 0; first < count; first += kTile) {
      char* group = static_cast<char*>(y) + first / kTile * group_bytes(d);
      RowSplitter<T>(source + first, count - first, d, mean, group, size + first).until(kTile * steps_of(d));
    }
  });
}

void scores(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
            int64_t d, float* out) {
  const ConfiguredTiles configured;
  const auto nothing = [] {};
  TileSums sums;
  for (int64_t first = 0; first < count; first += kTile) {
    const char *rows = static_cast<const char*>(y) + first / kTile * group_bytes(d),
               *codewords = static_cast<const char*>(panels);
    blocks == 1 ? multiply<1>(rows, codewords, d, sums, nothing)
                : multiply<2>(rows, codewords, d, sums, nothing);
    for (int64_t r = 0; r < kTile && first + r < count; ++r) {
      for (int64_t tile = 0; tile < 2 * blocks; ++tile) {
        const __m512 half = _mm512_loadu_ps(half_squares + tile * kTile);
        _mm512_storeu_ps(out + (first + r) * blocks * kPair + tile * kTile,
                         _mm512_sub_ps(half, _mm512_load_ps(sums.product[tile][r])));
      }
    }
  }
}

}  // namespace

const VqAssignKernel vq_assign_small_k_amx{
    Arithmetic::bf16x3, kRows,       kPair,   two_groups, small_k_block_bytes,
    pack_columns,       load_groups, nullptr, scores,     load_top_two};

}  // namespace uefl::cpu
#endif
