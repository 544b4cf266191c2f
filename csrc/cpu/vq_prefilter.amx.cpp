// The prefilter on AMX, with one product of bfloat16 instead of three.
//
// The kernel scores a chunk of codewords, keeps the best score of each row, and then scans the chunk for
// scores near the best one. The tile unit does not use one of the two vector ports, so it is free for these
// comparisons. They are issued in portions, one after every few products of later codewords.
#if defined(__x86_64__)
#include "cpu/vq_assign_tiles.h"
#include "cpu/vq_prefilter_candidates.h"

namespace uefl::cpu {
namespace {

constexpr int kChunkBlocks = 8;  // blocks that are scanned together; their scores with 32 rows take 32 KiB

// Computes the products of 32 codewords and 32 rows. between() runs after every four of them.
template <class Between>
inline __attribute__((always_inline)) void multiply(const char* codewords, const char* y, int64_t part,
                                                    Products& products, const Between& between) {
  Products::begin();
  for (int64_t i = 0; i < part; i += 2 * kTileBytes) {
    _tile_loadd(4, codewords + i, 64);
    _tile_loadd(6, y + i, 64);
    _tile_loadd(7, y + i + kTileBytes, 64);
    _tile_loadd(5, codewords + i + kTileBytes, 64);
    Products::add();
    between();
  }
  products.end();
}

// Products of a chunk with 32 rows that wait for comparisons.
struct Chunk {
  const Products* products;
  const float* half_squares;  // of its first codeword
  int first, count;           // of codewords
  int64_t row;
};

// Finds the best score of each row of a chunk so far.
class Lowest {
 public:
  inline __attribute__((always_inline)) Lowest(const Chunk& chunk, const CandidateLists& found)
      : chunk_(chunk) {
    for (int i = 0; i < 2; ++i) best_[i] = _mm512_loadu_ps(found.best + chunk.row + i * kTile);
  }
  inline __attribute__((always_inline)) void until(int k) {
    for (; done_ < k; ++done_) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        best_[i] = _mm512_min_ps(chunk_.products[done_ / kPair].score(
                                     done_ % kPair, i, chunk_.half_squares + done_ / kPair * kPair),
                                 best_[i]);
      }
    }
  }
  inline __attribute__((always_inline)) void save(CandidateLists& found) const {
    for (int i = 0; i < 2; ++i) _mm512_storeu_ps(found.best + chunk_.row + i * kTile, best_[i]);
  }

 private:
  const Chunk chunk_;
  __m512 best_[2];
  int done_ = 0;
};

// Lists the codewords with scores near the best one.
class Close {
 public:
  inline __attribute__((always_inline)) Close(const Chunk& chunk, CandidateLists& found)
      : chunk_(chunk), found_(found) {
    for (int i = 0; i < 2; ++i) {
      const int64_t row = chunk.row + i * kTile;
      limit_[i] = _mm512_add_ps(_mm512_loadu_ps(found.best + row), _mm512_loadu_ps(found.margin + row));
    }
  }
  inline __attribute__((always_inline)) void until(int k) {
    for (; done_ < k; ++done_) {
      const Products& products = chunk_.products[done_ / kPair];
      const float* half_squares = chunk_.half_squares + done_ / kPair * kPair;
      __m512 score[2];
      __mmask16 close[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        score[i] = products.score(done_ % kPair, i, half_squares);
        close[i] = _mm512_cmp_ps_mask(score[i], limit_[i], _CMP_LE_OQ);
      }
      if (__builtin_expect(!_kortestz_mask16_u8(close[0], close[1]), 0))
        note_all(close[0] | static_cast<uint32_t>(close[1]) << kTile);
    }
  }

 private:
  __attribute__((noinline)) void note_all(uint32_t rows) {
    const Products& products = chunk_.products[done_ / kPair];
    for (; rows; rows &= rows - 1) {
      const int row = __builtin_ctz(rows);
      const float score =
          chunk_.half_squares[done_] - products.value[done_ % kPair][row / kTile][row % kTile];
      note(found_, chunk_.row + row, chunk_.first + done_, score);
    }
  }

  const Chunk chunk_;
  CandidateLists& found_;
  __m512 limit_[2];
  int done_ = 0;
};

void candidates(const void* y, int64_t count, const void* panels, const float* half_squares, int64_t blocks,
                int64_t d, float, Ahead ahead, void* scratch, CandidateLists& out) {
  const ConfiguredTiles configured;
  const int64_t part = part_bytes(d), groups = (count + kPair - 1) / kPair,
                chunks = (blocks + kChunkBlocks - 1) / kChunkBlocks;
  const int64_t steps = part / (2 * kTileBytes);  // steps of four products in a block
  const int64_t bytes =
      (ahead.end - ahead.next + 63) / (steps * blocks * groups) + 1;  // lines to prefetch per step
  const char* line = ahead.next;
  for (int64_t r = 0; r < groups * kPair; ++r) {
    out.best[r] = __builtin_inff();
    out.count[r] = 0;
    if (r >= count) out.margin[r] = __builtin_nanf("");
  }
  auto* const products = static_cast<Products(*)[kChunkBlocks]>(scratch);
  Chunk waiting{products[1], half_squares, 0, 0, 0};
  int turn = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = blocks * chunk / chunks, end = blocks * (chunk + 1) / chunks;
    for (int64_t g = 0; g < groups; ++g, turn ^= 1) {
      const Chunk current{products[turn], half_squares + begin * kPair, static_cast<int>(begin) * kPair,
                          static_cast<int>(end - begin) * kPair, g * kPair};
      Close close(waiting, out);
      Lowest lowest(current, out);
      // `rate` is in units of 2^-16 codewords per step.
      const int rate = static_cast<int>((int64_t{waiting.count} << 16) / (steps * (end - begin))) + 1;
      const int lowest_rate = static_cast<int>((int64_t{kPair} << 16) / steps) + 1;
      int progress = 0;
      for (int64_t block = begin; block < end; ++block) {
        const int scored = static_cast<int>(block - begin) * kPair;  // all except this block
        int lowest_progress = 0;
        const auto between = [&]() __attribute__((always_inline)) {
          for (ahead.next += bytes; line < ahead.next && line < ahead.end; line += 64)
            _mm_prefetch(line, _MM_HINT_T1);
          progress += rate;
          close.until(progress >> 16 < waiting.count ? progress >> 16 : waiting.count);
          lowest_progress += lowest_rate;
          const int before = scored - kPair + (lowest_progress >> 16);
          lowest.until(before < scored ? before : scored);
        };
        multiply(static_cast<const char*>(panels) + block * part, static_cast<const char*>(y) + g * part,
                 part, products[turn][block - begin], between);
      }
      close.until(waiting.count);
      lowest.until(current.count);
      lowest.save(out);
      waiting = current;
    }
  }
  Close(waiting, out).until(waiting.count);
}

double pack_codeword(const float* code, int64_t d, float, int64_t lane, void* block) {
  return pack<1>(code, d, lane, block);
}

}  // namespace

const PrefilterKernel vq_prefilter_amx{Arithmetic::bf16, 6 * kPair,      kPair,
                                       tile_bytes<1>,    block_bytes<1>, 2 * kChunkBlocks * sizeof(Products),
                                       pack_codeword,    load<1>,        candidates,
                                       score_candidates};

}  // namespace uefl::cpu
#endif
