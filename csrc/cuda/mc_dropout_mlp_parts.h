// The parts of the kernels of mc_dropout_mlp on CUDA: the problem, the masks, and the softmax of a row.
//
// Lane 4 g + t of a fragment takes row g (and g + 8). A sum may have its units in any order, so lane t takes
// units 8 t ... 8 t + 7 of a block of 32: the numbers of one Philox call. In a block of 8 n outputs, lane t
// computes outputs 2 n t ... 2 n t + 2 n - 1.
#pragma once

#include <cstdint>

#include "common/mc_dropout.h"
#include "cuda/mma.h"
#include "cuda/rows.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

constexpr int kThreads = 128, kSide = kThreads / kWarp;  // a thread block has kSide warps
constexpr int kTileRows = 16, kUnits = 32;               // rows of a tile; units of a block of a sum
constexpr int kVectors = kTileRows * kUnits / 4;         // float4 in a tile's block of units
constexpr int kPasses = 2, kMostSlots = 24;              // passes that a warp works on at once; shares of the
                                                         // passes

// A threshold of 16 bits in both halves of a word: its lower 15 bits, and its inverted upper bit.
struct Halves {
  uint32_t low, not_high;
};

struct McProblem {
  const uint4* x;  // [tiles, unit_blocks, kHeadVectors] from pack_rows
  int64_t first_row;
  int tiles, unit_blocks, classes, padded_classes, slots;
  int side;  // slots of a tile that go to neighboring warps
  uint32_t passes;
  uint32_t begin[kMostSlots + 1];  // slot s has the pairs begin[s] ... begin[s + 1] - 1
  float share[kMostSlots];         // the passes of slot s, divided by the passes of slots 0 ... s
  bool consistent;
  const int64_t* seed;
  Halves unit_threshold;
  uint32_t logit_threshold;  // in the upper half of 32 bits, where it is compared
  float logit_scale;
  const uint4* weights;            // [unit_blocks, head_weights(n)] from pack_weights
  const float* bias;               // [classes]
  float *mean, *moment, *entropy;  // [slots, 16 tiles, padded_classes] twice, and [slots, 16 tiles]: means
                                   // and sums of each slot

  __device__ int64_t rows() const { return int64_t{tiles} * kTileRows; }
  UEFL_HOST_DEVICE int64_t items() const { return int64_t{tiles} * ((slots + side - 1) / side * side); }
};

// One item of work of a warp. The first slots of all tiles, which are the longest, come first. A number after
// the last slot stands for no work.
struct TileSlot {
  int tile, slot;

  __device__ TileSlot(const McProblem& problem, int64_t i)
      : tile(static_cast<int>(i / problem.side % problem.tiles)),
        slot(static_cast<int>(i / problem.side / problem.tiles * problem.side + i % problem.side)) {}
};

__device__ inline int64_t thread() { return blockIdx.x * int64_t{blockDim.x} + threadIdx.x; }
__device__ inline int64_t threads() { return gridDim.x * int64_t{blockDim.x}; }

// Returns the additions to the key in each round. They are in shared memory, because registers for them would
// cost a third of the warps.
__device__ inline const volatile uint2* round_keys(const int64_t* seed) {
  __shared__ uint2 keys[kPhiloxRounds];
  const auto key = static_cast<uint64_t>(*seed);
  if (threadIdx.x < kPhiloxRounds) {
    keys[threadIdx.x].x = static_cast<uint32_t>(key) + threadIdx.x * kPhiloxWeyl0;
    keys[threadIdx.x].y = static_cast<uint32_t>(key >> 32) + threadIdx.x * kPhiloxWeyl1;
  }
  __syncthreads();
  return keys;
}

struct Product64 {
  uint32_t low, high;
};
__device__ inline Product64 multiply(uint32_t a, uint32_t b) {
  const uint64_t product = uint64_t{a} * b;
  return {static_cast<uint32_t>(product), static_cast<uint32_t>(product >> 32)};
}

// The masks of a lane's two rows in a pair of passes, in one stream.
//
// The counter is (pass, row, stream, call). So most of the first three rounds is the same for all rows or for
// all calls. The constant parts are computed once, and a call costs seven rounds and two exclusive ors.
template <bool kConsistent>
struct Masks {
  static constexpr int kRows = kConsistent ? 1 : 2;
  const volatile uint2* keys;
  uint32_t from_pass[kPasses], from_stream;  // terms of the third word of round 1, and of the first word of
                                             // round 2
  uint32_t from_row[kRows], first[kPasses][kRows], second[kPasses][kRows];  // terms of the words of round 3

  __device__ Masks(const volatile uint2* keys, uint32_t first_pass, uint32_t first_row, uint32_t stream)
      : keys(keys) {
    const Product64 streams = multiply(stream, kPhiloxMultiplier1);
    from_stream = streams.low ^ keys[1].x;
    UEFL_UNROLL
    for (int p = 0; p < kPasses; ++p) {
      const Product64 passes = multiply(first_pass + p, kPhiloxMultiplier0);
      from_pass[p] = passes.high ^ keys[0].y;
      UEFL_UNROLL
      for (int h = 0; h < kRows; ++h) {
        const Product64 rows =
            multiply(streams.high ^ (kConsistent ? 0 : first_row + 8 * h) ^ keys[0].x, kPhiloxMultiplier0);
        const Product64 both = multiply(rows.high ^ passes.low ^ keys[1].y, kPhiloxMultiplier1);
        from_row[h] = rows.low ^ keys[2].y;
        first[p][h] = both.high ^ keys[2].x, second[p][h] = both.low;
      }
    }
  }

  __device__ void draw(uint32_t call, PhiloxWords (&words)[kPasses][kRows]) const {
    UEFL_UNROLL
    for (int p = 0; p < kPasses; ++p) {
      const Product64 two = multiply(from_pass[p] ^ call, kPhiloxMultiplier1),
                      three = multiply(two.high ^ from_stream, kPhiloxMultiplier0);
      UEFL_UNROLL
      for (int h = 0; h < kRows; ++h)
        words[p][h] = {{first[p][h] ^ two.low, second[p][h], three.high ^ from_row[h], three.low}};
    }
    UEFL_UNROLL
    for (int round = 3; round < kPhiloxRounds; ++round) {
      const uint32_t low_key = keys[round].x, high_key = keys[round].y;
      UEFL_UNROLL
      for (int i = 0; i < kPasses * kRows; ++i) {
        uint32_t (&word)[4] = words[i / kRows][i % kRows].word;
        const Product64 a = multiply(word[0], kPhiloxMultiplier0), b = multiply(word[2], kPhiloxMultiplier1);
        word[0] = b.high ^ word[1] ^ low_key, word[1] = b.low, word[2] = a.high ^ word[3] ^ high_key,
        word[3] = a.low;
      }
    }
  }
};

// Return the sum, or the largest value, of the four lanes of a row.
__device__ inline float row_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}
__device__ inline float row_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

// The softmax of one row. fmaxf() ignores a NaN, but the total does not. The hardware computes the
// exponential and the logarithm. The error of exp(x) is a few units of its last place plus |x| units, which
// is below 2^-22 for every x <= 0. The error of the logarithm is below 2^-19.
struct Softmax {
  float most = -INFINITY, total = 0, weighted = 0,
        inverse = 0;  // weighted: sum of exp(below) below; inverse: 1 / total

  __device__ float power(float logit) const { return __expf(logit - most); }
  __device__ float add(float logit) {
    const float e = power(logit);
    total += e;
    weighted += e > 0 ? e * (logit - most) : 0.0f;
    return e;
  }
  __device__ void sum_up() {
    total = row_sum(total), weighted = row_sum(weighted);
    inverse = __fdividef(1, total);
  }
  __device__ float nats() const { return __logf(total) - weighted * inverse; }
};

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda
