// The parts of the kernels of mc_dropout_mlp on CUDA: packed rows and weights, masks, and products on tensor
// cores.
//
// Each product runs on tensor cores as three products of tf32. A number is split into its first 11 bits and
// the first 11 bits of the rest, together within 2^-21, and the product of the two rests is left out. Tensor
// cores may truncate a sum, so they sum 32 units, and these sums are added in float32. tf32 has the range of
// float32. So nothing is scaled, and NaN and infinities stay in their row. `stack` uses these products,
// because its units change with every layer and pass. `head` has its own products (mc_dropout_mlp_head.h).
//
// Lane 4 g + t of a fragment takes row g (and g + 8). A sum may have its units in any order, so lane t takes
// units 8 t ... 8 t + 7 of a block of 32: the numbers of one Philox call. In a block of 8 n outputs, lane t
// computes outputs 2 n t ... 2 n t + 2 n - 1. So a lane computes the units that it needs for the next layer.
#pragma once

#include <cstdint>

#include "common/mc_dropout.h"
#include "cuda/mma.h"
#include "cuda/rows.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

constexpr int kThreads = 128, kSide = kThreads / kWarp;  // a block has kSide warps
constexpr int kTileRows = 16, kUnits = 32;               // rows of a tile; units of a block of a sum
constexpr int kVectors = kTileRows * kUnits / 4;         // float4 in a tile's block of units
constexpr int kPasses = 2, kMostSlots = 24;              // passes that a warp works on at once; shares of the
                                                         // passes
constexpr int kWideOutputs = 4,
              kMostLayers = 32;  // n8 blocks in a block of outputs in stack; layers after the first dropout

struct Layer {
  int inputs, outputs, unit_blocks, output_blocks;
  const float4* weights;  // [output_blocks, unit_blocks, 4, n, 32] from pack_weights
  const float* bias;      // [outputs]
};

// A threshold of 16 bits in both halves of a word: its lower 15 bits, and its inverted upper bit.
struct Halves {
  uint32_t low, not_high;
};

struct McProblem {
  const float4* x;  // [tiles, unit_blocks, 4, 32] from pack_rows
  int64_t first_row;
  int tiles, unit_blocks, depth, classes, padded_classes, slots;
  int side;  // slots of a tile that go to neighboring warps
  uint32_t passes;
  uint32_t begin[kMostSlots + 1];  // slot s has the pairs begin[s] ... begin[s + 1] - 1
  float share[kMostSlots];         // the passes of slot s, divided by the passes of slots 0 ... s
  McActivation activation;
  bool consistent;
  const int64_t* seed;
  float logit_scale;
  Halves halves;                         // of thresholds[0]
  uint32_t thresholds[kMostLayers + 1];  // of 32 bits, in whose high half the threshold is compared: for the
                                         // inputs, each layer, the logits
  Layer layers[kMostLayers];
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

// Packs rows. In a block, vector 2 h + q of lane 4 g + t has the units from 8 t + 4 q on of row g + 8 h.
template <class T>
__global__ void pack_rows(const T* x, int64_t rows, int inputs, int64_t row_stride, int64_t stride,
                          int unit_blocks, int64_t vectors, float4* packed) {
  for (int64_t i = thread(); i < vectors; i += threads()) {
    const int lane = static_cast<int>(i % kWarp), q = static_cast<int>(i / kWarp % 4);
    const int64_t block = i / kVectors, row = block / unit_blocks * kTileRows + q / 2 * 8 + lane / 4;
    const int unit = static_cast<int>(block % unit_blocks) * kUnits + lane % 4 * 8 + q % 2 * 4;
    const auto at = [&](int j) {
      return row < rows && unit + j < inputs ? widen(x[row * row_stride + (unit + j) * stride]) : 0.0f;
    };
    packed[i] = {at(0), at(1), at(2), at(3)};
  }
}

__device__ inline float first_bits(float value) { return __int_as_float(__float_as_int(value) & ~0x1fff); }
__device__ inline uint32_t bits(float value) { return static_cast<uint32_t>(__float_as_int(value)); }

// Packs weights [outputs, inputs], times the scale of the dropout: the first bits of units 8 t + 2 s and 8 t
// + 2 s + 1, and their rests.
__global__ void pack_weights(const float* weights, int inputs, int outputs, int n, float scale,
                             int unit_blocks, int64_t vectors, float4* packed) {
  for (int64_t i = thread(); i < vectors; i += threads()) {
    const int lane = static_cast<int>(i % kWarp), block = static_cast<int>(i / kWarp % n),
              step = static_cast<int>(i / kWarp / n % 4);
    const int64_t blocks = i / kWarp / n / 4;
    const int unit = static_cast<int>(blocks % unit_blocks) * kUnits + lane % 4 * 8 + 2 * step;
    const int64_t output = blocks / unit_blocks * 8 * n + lane / 8 * 2 * n + 2 * block + lane / 4 % 2;
    const auto at = [&](int j) {
      return output < outputs && unit + j < inputs ? weights[output * inputs + unit + j] * scale : 0.0f;
    };
    const float first = at(0), second = at(1), head0 = first_bits(first), head1 = first_bits(second);
    // Adds half of the last bit that is kept, so that the cut rounds to nearest.
    const auto rounded = [](float rest) { return __int_as_float(static_cast<int>(bits(rest) + 0x1000)); };
    packed[i] = {head0, head1, first_bits(rounded(first - head0)), first_bits(rounded(second - head1))};
  }
}

// The units of a lane in one pass, in a block of units: eight of row g and eight of row g + 8.
struct Units {
  float row[2][8];
};

__device__ inline Units load_units(const float4* block, int lane) {
  Units units;
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float4 part = block[i * kWarp + lane];
    float* target = units.row[i / 2] + i % 2 * 4;
    target[0] = part.x, target[1] = part.y, target[2] = part.z, target[3] = part.w;
  }
  return units;
}

__device__ inline void store_units(const Units& units, float4* block, int lane) {
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float* source = units.row[i / 2] + i % 2 * 4;
    block[i * kWarp + lane] = {source[0], source[1], source[2], source[3]};
  }
}

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

struct Product {
  uint32_t low, high;
};
__device__ inline Product multiply(uint32_t a, uint32_t b) {
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
    const Product streams = multiply(stream, kPhiloxMultiplier1);
    from_stream = streams.low ^ keys[1].x;
    UEFL_UNROLL
    for (int p = 0; p < kPasses; ++p) {
      const Product passes = multiply(first_pass + p, kPhiloxMultiplier0);
      from_pass[p] = passes.high ^ keys[0].y;
      UEFL_UNROLL
      for (int h = 0; h < kRows; ++h) {
        const Product rows =
            multiply(streams.high ^ (kConsistent ? 0 : first_row + 8 * h) ^ keys[0].x, kPhiloxMultiplier0);
        const Product both = multiply(rows.high ^ passes.low ^ keys[1].y, kPhiloxMultiplier1);
        from_row[h] = rows.low ^ keys[2].y;
        first[p][h] = both.high ^ keys[2].x, second[p][h] = both.low;
      }
    }
  }

  __device__ void draw(uint32_t call, PhiloxWords (&words)[kPasses][kRows]) const {
    UEFL_UNROLL
    for (int p = 0; p < kPasses; ++p) {
      const Product two = multiply(from_pass[p] ^ call, kPhiloxMultiplier1),
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
        const Product a = multiply(word[0], kPhiloxMultiplier0), b = multiply(word[2], kPhiloxMultiplier1);
        word[0] = b.high ^ word[1] ^ low_key, word[1] = b.low, word[2] = a.high ^ word[3] ^ high_key,
        word[3] = a.low;
      }
    }
  }

  // Drops units among the eight of a call. The threshold has 32 bits, so that a half word is compared in
  // place, or 16 bits higher.
  __device__ void drop(Units (&units)[kPasses], uint32_t threshold, uint32_t call) const {
    PhiloxWords words[kPasses][kRows];
    draw(call, words);
    UEFL_UNROLL
    for (int i = 0; i < kPasses * 16; ++i) {
      const int p = i / 16, h = i / 8 % 2, j = i % 8;
      const uint32_t word = words[p][kConsistent ? 0 : h].word[j / 2];
      if ((j % 2 ? word : word << 16) < threshold) units[p].row[h][j] = 0;
    }
  }
};

// Adds the products of units and weights over one block of units to sums[pass][n8 block].
template <int kBlocks>
__device__ inline void multiply_block(const Units (&units)[kPasses], const float4* weights, int lane,
                                      float (&sums)[kPasses][kBlocks][4]) {
  float part[kPasses][kBlocks][4] = {};
  UEFL_UNROLL
  for (int step = 0; step < 4; ++step) {
    uint32_t first[kPasses][4], rest[kPasses][4];
    UEFL_UNROLL
    for (int p = 0; p < kPasses; ++p) {
      UEFL_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float value = units[p].row[i % 2][2 * step + i / 2], head = first_bits(value);
        first[p][i] = bits(head), rest[p][i] = bits(value - head);
      }
    }
    UEFL_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const float4 w = weights[(step * kBlocks + block) * kWarp + lane];
      UEFL_UNROLL
      for (int p = 0; p < kPasses; ++p) multiply_add_tf32(part[p][block], rest[p], bits(w.x), bits(w.y));
      UEFL_UNROLL
      for (int p = 0; p < kPasses; ++p) multiply_add_tf32(part[p][block], first[p], bits(w.z), bits(w.w));
      UEFL_UNROLL
      for (int p = 0; p < kPasses; ++p) multiply_add_tf32(part[p][block], first[p], bits(w.x), bits(w.y));
    }
  }
  UEFL_UNROLL
  for (int p = 0; p < kPasses; ++p) {
    UEFL_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) sums[p][i / 4][i % 4] += part[p][i / 4][i % 4];
  }
}

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda
