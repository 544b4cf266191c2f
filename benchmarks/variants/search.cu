// Variants of the loop of the search: products of 64 rows with 128 codewords at a time, and the comparison of
// their scores. Rows and codewords are packed in the layout of the products. So a variant is timed without
// the preparation and the end of the rows.
//
// kGroups warpgroups multiply and compare. One more warpgroup copies: one thread copies the codebook, another
// one the rows. If the ring has a place for every block of the codebook, the codebook is copied once. All
// warpgroups take the same number of rounds. In the last rounds, a warpgroup may repeat rows of another one
// without writing its results.
#include "compare.h"

namespace uefl::variants {
namespace {

constexpr int kCodewordsBytes = 128 * 64 * 2, kRowsBytes = 64 * 64 * 2, kAhead = 2, kMarks = 64;

struct alignas(16) LaneResult {  // result of a lane for a row
  int best, second, tile, none;
};

struct SearchWork {
  const unsigned char* rows;       // [blocks, chunks] tiles of 64 x 64 float16
  const unsigned char* codewords;  // [tiles, chunks] blocks of 128 x 64 float16, negated
  const float* starts;             // [tiles, 4, kStarts] |c|^2 / 2 above a base
  LaneResult* found;               // [blocks * 64, 4 lanes]
  long long* marks;                // [grid, groups, kMarks, {begin, multiplied, compared}] clocks
  int blocks, tiles, places, shift;
};

// kFirst: the sums begin at the starts. kMarked: stores the clock at the beginning and the end of products
// and comparisons. Rows of more than two chunks are read from shared memory for each product.
template <class Way, int kGroups_, int kChunks_, bool kFirst_ = false, bool kMarked_ = false>
struct SearchVariant {
  using How = Way;
  static constexpr int kGroups = kGroups_, kChunks = kChunks_, kThreads = (kGroups_ + 1) * 128;
  static constexpr bool kFirst = kFirst_, kMarked = kMarked_, kLong = kChunks > 2;
  static constexpr int kTiles = kLong ? 1 : kAhead;  // tiles of rows for each warpgroup
  static constexpr int kFragments = kLong ? 1 : kChunks;
  static constexpr int kStarts = kFirst ? 68 : 36;  // floats of a lane; neighbors are in different banks
  static constexpr int kStartsBytes = 4 * kStarts * sizeof(float);
  static constexpr int kRegisters = kGroups == 4 ? 112 : kGroups == 3 ? 152 : 224;
};

template <class V>
struct VariantMemory {
  int places;
  __device__ unsigned char* codewords(int place) const { return dynamic_memory() + place * kCodewordsBytes; }
  __device__ unsigned char* rows(int group, int tile) const {
    return dynamic_memory() + places * kCodewordsBytes + (group * V::kTiles + tile) * V::kChunks * kRowsBytes;
  }
  __device__ unsigned char* starts(int place) const { return rows(V::kGroups, 0) + place * V::kStartsBytes; }
  __device__ Barrier* full(int place) const { return reinterpret_cast<Barrier*>(starts(places)) + place; }
  __device__ Barrier* empty(int place) const { return full(places) + place; }
  __device__ Barrier* rows_full(int group, int tile) const {
    return empty(places) + group * V::kTiles + tile;
  }
  __device__ Barrier* rows_empty(int group, int tile) const {
    return rows_full(V::kGroups, 0) + group * V::kTiles + tile;
  }
};

struct BlockRing {
  int size, place = 0;
  unsigned parity = 0;
  __device__ void advance() {
    if (++place == size) place = 0, parity ^= 1;
  }
};

template <class V>
__device__ int rounds_of(const SearchWork& work) {
  const int at_once = static_cast<int>(gridDim.x) * V::kGroups;
  return (work.blocks + at_once - 1) / at_once;
}
template <class V>
__device__ int block_of(int round, int group) {
  return (round * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * V::kGroups + group;
}

template <class V>
__device__ void feed_codewords(const SearchWork& work, const VariantMemory<V>& memory) {
  const int blocks = work.tiles * V::kChunks;
  const bool resident = work.places == blocks;
  BlockRing ring{work.places};
  for (int round = 0; round < (resident ? 1 : rounds_of<V>(work)); ++round) {
    for (int block = 0; block < blocks; ++block, ring.advance()) {
      if (!resident) barrier_wait(memory.empty(ring.place), ring.parity ^ 1);
      Barrier* full = memory.full(ring.place);
      barrier_arrive_expecting(full, kCodewordsBytes + V::kStartsBytes);
      const unsigned char* source = work.codewords + static_cast<int64_t>(block) * kCodewordsBytes;
      copy_bulk(memory.codewords(ring.place), source, kCodewordsBytes, full);
      copy_bulk(memory.starts(ring.place), work.starts + block / V::kChunks * (V::kStartsBytes / 4),
                V::kStartsBytes, full);
    }
  }
}

template <class V>
__device__ void feed_rows(const SearchWork& work, const VariantMemory<V>& memory) {
  BlockRing ring{V::kTiles};
  for (int round = 0; round < rounds_of<V>(work); ++round, ring.advance()) {
    for (int group = 0; group < V::kGroups; ++group) {
      const int block = lesser(block_of<V>(round, group), work.blocks - 1);
      barrier_wait(memory.rows_empty(group, ring.place), ring.parity ^ 1);
      Barrier* full = memory.rows_full(group, ring.place);
      barrier_arrive_expecting(full, V::kChunks * kRowsBytes);
      copy_bulk(memory.rows(group, ring.place),
                work.rows + static_cast<int64_t>(block) * V::kChunks * kRowsBytes, V::kChunks * kRowsBytes,
                full);
    }
  }
}

// Multiplies a tile of codewords. Up to two chunks stay in registers as fragments. With longer rows, two
// chunks are under way. Returns the place of the chunk before the last one, which is still read if there are
// two.
template <class V>
__device__ int multiply(float (&sums)[64], uint32_t (&fragments)[V::kFragments][4][4],
                        const unsigned char* rows, const VariantMemory<V>& memory, BlockRing& ring,
                        bool arrived, const auto& release) {
  int before = 0;
  UEFL_UNROLL
  for (int chunk = 0; chunk < V::kChunks; ++chunk) {
    if (!arrived) barrier_wait(memory.full(ring.place), ring.parity);
    const uint64_t right = operand(memory.codewords(ring.place)), left = operand(rows + chunk * kRowsBytes);
    warpgroup_fence_registers(sums);
    warpgroup_arrive();
    UEFL_UNROLL
    for (int step = 0; step < 4; ++step) {
      const bool add = V::kFirst || chunk + step > 0;
      if constexpr (V::kLong) {
        multiply_group(sums, left + step * kOperandStep, right + step * kOperandStep, add);
      } else {
        multiply_group(sums, fragments[chunk][step], right + step * kOperandStep, add);
      }
    }
    warpgroup_commit();
    if (V::kLong && chunk > 0) {
      warpgroup_wait<1>();
      release(before);
    }
    if (chunk + 1 < V::kChunks) {
      before = ring.place;
      ring.advance();
    }
  }
  return before;
}

template <class V>
__device__ void compare(const float (&sums)[64], const float* starts, int shift, int tile,
                        KeptScores (&kept)[2]) {
  float scores[2][32];
  UEFL_UNROLL
  for (int n = 0; n < 32; n += 4) {
    const float4 start = V::kFirst ? float4{} : *reinterpret_cast<const float4*>(starts + n);
    const float of[4] = {start.x, start.y, start.z, start.w};
    UEFL_UNROLL
    for (int i = 0; i < 4; ++i) {
      UEFL_UNROLL
      for (int row = 0; row < 2; ++row) {
        const float sum = sums[(n + i) / 2 * 4 + 2 * row + (n + i) % 2];
        scores[row][n + i] = V::kFirst ? sum : sum + of[i];
      }
    }
  }
  UEFL_UNROLL
  for (int row = 0; row < 2; ++row) kept[row].add(V::How::run(scores[row], shift), tile);
}

__device__ inline void load_starts(const float* first, float (&sums)[64]) {
  UEFL_UNROLL
  for (int i = 0; i < 64; i += 4) {
    const float4 start = *reinterpret_cast<const float4*>(first + i);
    sums[i] = start.x, sums[i + 1] = start.y, sums[i + 2] = start.z, sums[i + 3] = start.w;
  }
}

template <class V>
__device__ void search(const SearchWork& work, const VariantMemory<V>& memory) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4;
  const bool resident = work.places == work.tiles * V::kChunks;
  BlockRing codewords{work.places}, tiles{V::kTiles};
  const auto release = [&](int place) {
    if (!resident) barrier_arrive_by_warp(memory.empty(place));
  };
  const int rounds = rounds_of<V>(work);
  for (int round = 0; round < rounds; ++round, tiles.advance()) {
    const int block = block_of<V>(round, group);
    const unsigned char* rows = memory.rows(group, tiles.place);
    barrier_wait(memory.rows_full(group, tiles.place), tiles.parity);
    uint32_t fragments[V::kFragments][4][4];
    if constexpr (!V::kLong) {
      UEFL_UNROLL
      for (int step = 0; step < V::kChunks * 4; ++step)
        load_fragment(fragments[step / 4][step % 4], rows + step / 4 * kRowsBytes, step % 4);
    }
    KeptScores kept[2];
    float sums[64];
    for (int tile = 0; tile < work.tiles; ++tile) {
      long long* mark = work.marks + ((blockIdx.x * V::kGroups + group) * kMarks + tile) * 3;
      const bool marked = V::kMarked && round == 0 && tile < kMarks && threadIdx.x % 128 == 0;
      if constexpr (V::kFirst) {
        if (round == 0 || !resident) barrier_wait(memory.full(codewords.place), codewords.parity);
        const float* first = reinterpret_cast<const float*>(memory.starts(codewords.place)) + t * V::kStarts;
        load_starts(first, sums);
      }
      if (marked) mark[0] = now();
      const int before =
          multiply<V>(sums, fragments, rows, memory, codewords, resident && round > 0, release);
      warpgroup_wait<0>();
      warpgroup_fence_registers(sums);
      if (marked) mark[1] = now();
      compare<V>(sums, reinterpret_cast<const float*>(memory.starts(codewords.place)) + t * V::kStarts,
                 work.shift, tile, kept);
      if (marked) mark[2] = now();
      if (V::kChunks == 2) release(before);
      release(codewords.place);
      codewords.advance();
    }
    barrier_arrive_by_warp(memory.rows_empty(group, tiles.place));
    UEFL_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int64_t at = static_cast<int64_t>(block) * 64 + warp * 16 + lane / 4 + 8 * row;
      const LaneResult answer{kept[row].two.best, kept[row].two.second, kept[row].tile, 0};
      if (block < work.blocks) work.found[at * 4 + t] = answer;
    }
  }
}

template <class V>
__device__ void run(const SearchWork& work) {
  const VariantMemory<V> memory{work.places};
  if (threadIdx.x == 0) {
    for (int i = 0; i < work.places; ++i) {
      barrier_init(memory.full(i), 1);
      barrier_init(memory.empty(i), V::kGroups * 4);
    }
    for (int i = 0; i < V::kGroups * V::kTiles; ++i) {
      barrier_init(memory.rows_full(0, i), 1);
      barrier_init(memory.rows_empty(0, i), 4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x / 128 < V::kGroups) {
    warpgroup_reg_alloc<V::kRegisters>();
    search<V>(work, memory);
  } else {
    warpgroup_reg_dealloc<V::kGroups == 4 ? 32 : 40>();
    if (threadIdx.x == V::kGroups * 128) feed_codewords<V>(work, memory);
    if (threadIdx.x == V::kGroups * 128 + 32) feed_rows<V>(work, memory);
  }
}

}  // namespace

#define VARIANT(name, ...)                                                                \
  extern "C" __global__ void __launch_bounds__((SearchVariant<__VA_ARGS__>::kThreads), 1) \
      name(const SearchWork work) {                                                       \
    run<SearchVariant<__VA_ARGS__>>(work);                                                \
  }
#include "table.h"

}  // namespace uefl::variants
