// The search on AMX: tiles of 16 x 32 bfloat16, multiplied into 16 x 16 sums in float32.
//
// Rows and codewords are split into two bfloat16 each (common/certificate.h). Codewords are the left operand
// and rows are the right one. So each vector lane keeps the best and second-best score of one row. This needs
// no reduction at the end, and the six vectors of 32 rows stay in registers. In return, each row is
// transposed once.
#if defined(__x86_64__)
#include "cpu/vq_assign_tiles.h"

namespace uefl::cpu {
namespace {

constexpr int kGroups = 6;  // pairs of row tiles that share one sweep over the codewords
// Bytes of codewords that stay in the second-level cache while all rows of a tile pass by.
constexpr int64_t kSweepBytes = 1 << 19;

// Computes the sums of all three products of 32 codewords and 32 rows. between() runs after every four tile
// products. Eight loads serve twelve products, because loading a tile of a long codeword from the
// second-level cache takes longer than a product.
template <class Between>
inline __attribute__((always_inline)) void multiply(const char* codewords, const char* y, int64_t part,
                                                    Products& products, const Between& between) {
  Products::begin();
  for (int64_t i = 0; i < part; i += 2 * kTileBytes) {
    _tile_loadd(4, codewords + i, 64);
    _tile_loadd(5, codewords + i + kTileBytes, 64);
    _tile_loadd(6, y + part + i, 64);
    _tile_loadd(7, y + part + i + kTileBytes, 64);
    Products::add();
    between();
    _tile_loadd(6, y + i, 64);
    _tile_loadd(7, y + i + kTileBytes, 64);
    Products::add();
    between();
    _tile_loadd(4, codewords + part + i, 64);
    _tile_loadd(5, codewords + part + i + kTileBytes, 64);
    Products::add();
    between();
  }
  products.end();
}

struct BestTwo {
  __m512 best[2], second[2];
  __m512i index[2];
};

// Scores that wait for their comparisons.
struct PendingScores {
  const Products* products;
  const float* half_squares;
  BestTwo* top;
  int code;  // the first codeword
};

// The comparisons of scores while products run. The tile unit takes one of the two vector ports, so the
// comparisons are free. The comparisons of one block of scores are issued in portions, one after every few
// products of the next block.
class Comparisons {
 public:
  inline __attribute__((always_inline)) explicit Comparisons(const PendingScores& pending)
      : from_(pending), top_(*pending.top) {}
  inline __attribute__((always_inline)) void until(int k) {
    for (; done_ < k; ++done_) {
      const __m512i code = _mm512_set1_epi32(from_.code + done_);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512 s = from_.products->score(done_, i, from_.half_squares);
        top_.index[i] =
            _mm512_mask_mov_epi32(top_.index[i], _mm512_cmp_ps_mask(s, top_.best[i], _CMP_LT_OQ), code);
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
  const PendingScores from_;
  BestTwo top_;
  int done_ = 0;
};

void top_two(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
             int64_t d, Ahead ahead, float* best, float* second, int64_t* index) {
  const ConfiguredTiles configured;
  const int64_t part = part_bytes(d), groups = (count + kPair - 1) / kPair;
  const int64_t sweep = kSweepBytes / (2 * part) + 1;
  const int64_t steps = 3 * part / (2 * kTileBytes);  // steps of four products in a block
  const int64_t bytes =
      (ahead.end - ahead.next + 63) / (steps * blocks * groups) + 1;  // lines to prefetch per step
  const int rate = static_cast<int>((int64_t{kPair} << 16) / steps) +
                   1;  // codewords to compare per step, in units of 2^-16
  BestTwo tops[kGroups], nowhere;
  for (BestTwo& top : tops) {
    for (int i = 0; i < 2; ++i) {
      top.best[i] = top.second[i] = _mm512_set1_ps(__builtin_inff());
      top.index[i] = _mm512_setzero_si512();
    }
  }
  nowhere = tops[0];
  Products products[2] = {};
  PendingScores pending{&products[1], half_squares, &nowhere, 0};
  const char* line = ahead.next;
  int turn = 0;
  for (int64_t begin = 0; begin < blocks; begin += sweep) {
    const int64_t end = begin + sweep < blocks ? begin + sweep : blocks;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t block = begin; block < end; ++block, turn ^= 1) {
        Comparisons comparisons(pending);
        int progress = 0;
        const auto between = [&]() __attribute__((always_inline)) {
          for (ahead.next += bytes; line < ahead.next && line < ahead.end; line += 64)
            _mm_prefetch(line, _MM_HINT_T1);
          progress += rate;
          comparisons.until(progress >> 16 < kPair ? progress >> 16 : kPair);
        };
        multiply(static_cast<const char*>(panels) + block * 2 * part,
                 static_cast<const char*>(y) + g * 2 * part, part, products[turn], between);
        comparisons.finish();
        pending = {&products[turn], half_squares + block * kPair, &tops[g], static_cast<int>(block) * kPair};
      }
    }
  }
  Comparisons(pending).finish();
  for (int64_t r = 0; r < count; ++r) {
    const BestTwo& top = tops[r / kPair];
    const int64_t i = r / kTile % 2, lane = r % kTile;
    best[r] = top.best[i][lane];
    second[r] = top.second[i][lane];
    index[r] = reinterpret_cast<const int*>(&top.index[i])[lane];
  }
}

void scores(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
            int64_t d, float* out) {
  const ConfiguredTiles configured;
  const int64_t part = part_bytes(d), width = blocks * kPair;
  Products products;
  alignas(64) float columns[kTile][kTile], rows[kTile][kTile];
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t first = 0; first < count; first += kPair) {
      multiply(static_cast<const char*>(panels) + block * 2 * part,
               static_cast<const char*>(y) + first / kPair * 2 * part, part, products, [] {});
      for (int i = 0; i < 4; ++i) {
        const int64_t row = first + i % 2 * kTile, code = block * kPair + i / 2 * kTile;
        for (int k = 0; k < kTile; ++k)
          _mm512_store_ps(columns[k], products.score(i / 2 * kTile + k, i % 2, half_squares + block * kPair));
        transpose(columns, 64, rows, 64);
        for (int64_t r = 0; r < kTile && row + r < count; ++r)
          __builtin_memcpy(out + (row + r) * width + code, rows[r], sizeof rows[r]);
      }
    }
  }
}

}  // namespace

const VqAssignKernel vq_assign_amx{Arithmetic::bf16x3,
                                   kGroups * kPair,
                                   kPair,
                                   tile_bytes<2>,
                                   block_bytes<2>,
                                   pack<2>,
                                   load<2>,
                                   top_two,
                                   scores};

}  // namespace uefl::cpu
#endif
