// The product on AMX. Rows are the left operand, which has their layout in memory. Units are transposed when
// they are packed. The second-level cache holds a block of rows and a slab of inputs while the panels of
// units pass by once.
#if defined(__x86_64__)
#include "cpu/linear_kernel.h"
#include "cpu/vq_assign_tiles.h"

namespace uefl::cpu {
namespace {

constexpr int kParts = 3;
// The bytes of 32 rows, or units, of 32 inputs: [3 parts][2] tiles.
constexpr int64_t kStepBytes = kParts * 2 * kTileBytes;
// Steps of a slab. Short chains of additions also have a smaller error than one long chain.
constexpr int64_t kSlab = 16;
constexpr int64_t kPairBytes = kSlab * kStepBytes;
constexpr int64_t kBlock = 128;  // rows that a panel of units multiplies one after the other; 32 if there is
                                 // one slab
constexpr int64_t kWorkBytes =
    2 * kBlock / kPair * kPairBytes;  // one block is multiplied while the next one is split

inline int64_t steps_of(int64_t inputs) { return (inputs + kDepth - 1) / kDepth; }
inline int64_t slab_end(int64_t inputs, int64_t slab) {
  return slab + kSlab < steps_of(inputs) ? slab + kSlab : steps_of(inputs);
}

// Splits 32 values into three times 32 bfloat16, in the order of split() in vq_assign_tiles.h. Returns the
// larger magnitude of each pair, as bits. A NaN is larger than any number.
inline __attribute__((always_inline)) __m512i split_in_three(__m512 (&rest)[2], __m512i (&parts)[kParts]) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i most = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(rest[0]), magnitude),
                                        _mm512_and_si512(_mm512_castps_si512(rest[1]), magnitude));
#pragma GCC unroll 3
  for (__m512i& part : parts) {
    const __m512i rounded[2] = {nearest(rest[0]), nearest(rest[1])};
    part = words(rounded[0], rounded[1]);
    for (int i = 0; i < 2; ++i) rest[i] = rest_of(rest[i], rounded[i]);
  }
  return most;
}

inline __attribute__((always_inline)) void read(const float* from, int64_t count, __m512 (&value)[2]) {
  const uint32_t mask = count < kDepth ? (1u << count) - 1 : 0xffffffffu;
  value[0] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
  value[1] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + kTile);
}

struct alignas(64) Sums {
  float product[4][kTile][kTile];  // [2 tiles of rows][2 tiles of units]
};

// Multiplies 32 rows and 32 units. The product is a b = (a1 + a2 + a3)(b1 + b2 + b3) without a2 b3, a3 b2 and
// a3 b3, which together are at most 2^-24 |a b|.
template <class Between>
inline __attribute__((always_inline)) void multiply(const char* rows, const char* units, int64_t steps,
                                                    Sums& sums, const Between& between) {
  asm volatile("" ::: "memory");  // GCC 12 does not know that tile loads read memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, rows += kStepBytes, units += kStepBytes) {
#define UEFL_ROWS(part)                               \
  _tile_loadd(4, rows + 2 * (part) * kTileBytes, 64); \
  _tile_loadd(5, rows + (2 * (part) + 1) * kTileBytes, 64)
#define UEFL_UNITS(part)                               \
  _tile_loadd(6, units + 2 * (part) * kTileBytes, 64); \
  _tile_loadd(7, units + (2 * (part) + 1) * kTileBytes, 64)
#define UEFL_ADD()         \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7)
    UEFL_ROWS(0);
    UEFL_UNITS(2);
    UEFL_ADD();
    UEFL_UNITS(1);
    UEFL_ADD();
    between();
    UEFL_ROWS(1);
    UEFL_ADD();
    UEFL_UNITS(0);
    UEFL_ADD();
    UEFL_ROWS(2);
    UEFL_ADD();
    UEFL_ROWS(0);
    UEFL_ADD();
#undef UEFL_ROWS
#undef UEFL_UNITS
#undef UEFL_ADD
  }
  _tile_stored(0, sums.product[0], 64);
  _tile_stored(1, sums.product[1], 64);
  _tile_stored(2, sums.product[2], 64);
  _tile_stored(3, sums.product[3], 64);
}

int64_t panel_bytes(int64_t inputs) { return steps_of(inputs) * kStepBytes; }

void pack_panel(const float* weight, int64_t inputs, int64_t outputs, int64_t panel, char* packed,
                uint32_t* largest) {
  alignas(64) __m512i lines[kParts][kTile];
  for (int64_t tile = 0; tile < 2; ++tile) {
    const int64_t first = panel * kPair + tile * kTile;
    __m512i most[kTile] = {};
    for (int64_t step = 0; step < steps_of(inputs); ++step) {
      for (int64_t lane = 0; lane < kTile; ++lane) {
        __m512 value[2] = {};
        __m512i parts[kParts];
        if (first + lane < outputs)
          read(weight + (first + lane) * inputs + step * kDepth, inputs - step * kDepth, value);
        most[lane] = _mm512_max_epi32(most[lane], split_in_three(value, parts));
        for (int part = 0; part < kParts; ++part) lines[part][lane] = parts[part];
      }
      char* target = packed + step * kStepBytes + tile * kTileBytes;
      for (int part = 0; part < kParts; ++part)
        transpose(lines[part], 64, target + 2 * part * kTileBytes, 64);
    }
    for (int64_t lane = 0; lane < kTile && first + lane < outputs; ++lane) {
      largest[tile * kTile + lane] = static_cast<uint32_t>(_mm512_reduce_max_epi32(most[lane]));
    }
  }
}

// Splits the rows of a block for one slab, 32 inputs at a time. An incomplete pair of tiles repeats the last
// row.
class Splitter {
 public:
  inline __attribute__((always_inline)) Splitter(const float* x, int64_t rows, int64_t inputs, int64_t slab,
                                                 char* target, uint32_t* largest)
      : x_(x),
        rows_(rows),
        inputs_(inputs),
        slab_(slab),
        step_(slab),
        end_(slab_end(inputs, slab)),
        target_(target),
        largest_(largest) {}

  inline __attribute__((always_inline)) void advance(int64_t steps) {
    for (; steps > 0 && row_ < (rows_ + kPair - 1) / kPair * kPair; --steps) {
      const int64_t row = row_ < rows_ ? row_ : rows_ - 1;
      char* target = target_ + row_ / kPair * kPairBytes + (step_ - slab_) * kStepBytes +
                     row_ / kTile % 2 * kTileBytes + row_ % kTile * 64;
      __m512 value[2];
      __m512i parts[kParts];
      read(x_ + row * inputs_ + step_ * kDepth, inputs_ - step_ * kDepth, value);
      most_ = _mm512_max_epi32(most_, split_in_three(value, parts));
      for (int part = 0; part < kParts; ++part)
        _mm512_store_si512(target + 2 * part * kTileBytes, parts[part]);
      if (++step_ < end_) continue;
      const uint32_t found = static_cast<uint32_t>(_mm512_reduce_max_epi32(most_));
      largest_[row] = largest_[row] < found ? found : largest_[row];
      most_ = _mm512_setzero_si512();
      step_ = slab_;
      ++row_;
    }
  }

 private:
  const float* x_;
  int64_t rows_, inputs_, slab_, step_, end_;
  char* target_;
  uint32_t* largest_;
  int64_t row_ = 0;
  __m512i most_ = _mm512_setzero_si512();
};

// Adds the sums of a slab to 32 rows of y, or to the bias in the first slab.
inline void add(const Sums& sums, const float* bias, int64_t rows, int64_t columns, int64_t outputs,
                float* y) {
  for (int64_t half = 0; half * kTile < columns; ++half, y += kTile) {
    const int64_t left = columns - half * kTile;
    const __mmask16 mask = static_cast<__mmask16>(left < kTile ? (1 << left) - 1 : 0xffff);
    for (int64_t row = 0; row < rows; ++row) {
      float* target = y + row * outputs;
      const __m512 before = bias ? _mm512_loadu_ps(bias + half * kTile) : _mm512_maskz_loadu_ps(mask, target);
      _mm512_mask_storeu_ps(
          target, mask,
          _mm512_add_ps(before, _mm512_load_ps(sums.product[row / kTile * 2 + half][row % kTile])));
    }
  }
}

void run(const float* x, int64_t lo, int64_t hi, int64_t inputs, const char* packed, const float* base,
         int64_t outputs, char* work, float* y, uint32_t* largest) {
  const ConfiguredTiles configured;
  const int64_t steps = steps_of(inputs), panels = (outputs + kPair - 1) / kPair;
  const int64_t block = steps <= kSlab ? kPair : kBlock, share = (kPair + panels - 1) / panels;
  const auto splitter = [&](int64_t first, int64_t slab, int64_t turn) {
    const int64_t rows = hi - first < block ? hi - first : block;
    return Splitter(x + first * inputs, rows, inputs, slab, work + turn * kBlock / kPair * kPairBytes,
                    largest + first - lo);
  };
  Sums sums;
  Splitter begin = splitter(lo, 0, 0);
  begin.advance(block * kSlab);
  int64_t turn = 0;
  for (int64_t first = lo; first < hi; first += block) {
    const int64_t rows = hi - first < block ? hi - first : block;
    for (int64_t slab = 0; slab < steps; slab += kSlab, turn ^= 1) {
      const bool last = slab + kSlab >= steps;
      Splitter next = last ? splitter(first + block < hi ? first + block : hi, 0, turn ^ 1)
                           : splitter(first, slab + kSlab, turn ^ 1);
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t column = panel * kPair, columns = outputs - column < kPair ? outputs - column : kPair;
        for (int64_t pair = 0; pair * kPair < rows; ++pair) {
          const int64_t from = first + pair * kPair;
          multiply(work + (turn * kBlock / kPair + pair) * kPairBytes,
                   packed + (panel * steps + slab) * kStepBytes, slab_end(inputs, slab) - slab, sums,
                   [&]() __attribute__((always_inline)) { next.advance(share); });
          add(sums, slab == 0 ? base + column : nullptr, hi - from < kPair ? hi - from : kPair, columns,
              outputs, y + from * outputs + column);
        }
      }
      next.advance(block * kSlab);
    }
  }
}

}  // namespace

const LinearTiles linear_amx{kWorkBytes, panel_bytes, pack_panel, run};

}  // namespace uefl::cpu
#endif
