// mc_dropout_mlp on CUDA for one layer after the first dropout with at most 32 outputs, which is the usual
// head, for sm_80 and later. A warp computes a share of the passes of 16 rows, with its masks in registers.
//
//   pack_...  writes rows and weights in the order of the lanes, padded with zeros; once per call
//   head      runs the passes: only the statistics leave the registers
//   combine   combines the statistics of the slots
//
// A warp has a tile of 16 rows and a slot, which is a range of pairs of passes. Both passes of a pair share
// each load of rows and weights. The slots depend only on the number of passes, and combine adds them up in
// their order. So the results of a row have the same bits for any grid and any number of rows. The slots
// become shorter and shorter, and the longest slots of all tiles come first. So the work at the end is short,
// and no multiprocessor waits for long. Warps never wait for one another: a lane reads only values from
// itself or from an earlier kernel.
//
// Rows and weights are the same in every pass, so each call splits them once: a number becomes the sum of two
// float16 numbers, to within 2^-23. A product takes three products of float16, because the product of the two
// low parts is left out. Powers of two scale the largest of 32 units of a row, and the largest weight of 32
// units, to 2^14 ... 2^15. Numbers below 2^-16 of the largest one lose bits, at most 2^-39 of it. A register
// holds two units, as a word of Philox holds two draws, so one mask drops both.
//
// The loop over blocks of units is bound by instructions. For 32 masks of a lane it has 311 of them on
// sm_90a: 142 for Philox with its keys, 64 that make masks of its words, 32 that drop units, 24 products, and
// 16 that add up the products. 167 of them use a unit that takes one instruction in two cycles.
#pragma once

#include "cuda/mc_dropout_mlp_parts.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

constexpr int kHeadSteps = 2;  // steps of 16 units in a block
constexpr int kHeadVectors =
    kVectors + kTileRows / 4;  // in a block of a tile: two float16 for a number, a scale for a row

// Returns the number of uint4 in a block of units: {first, rest} of each step, n8 block and lane, and the
// scale.
UEFL_HOST_DEVICE constexpr int head_weights(int n) { return kHeadSteps * n * kWarp + 1; }

// The power of two 2^(14 - e) for a number in 2^e ... 2^(e + 1), and its inverse.
struct PowerOfTwo {
  float there, back;

  __device__ explicit PowerOfTwo(float most) {
    const int exponent = __float_as_int(most) >> 23;  // the upper bits of a number that is not negative
    const int bounded = exponent < 15 ? 15 : exponent;
    there = __int_as_float((268 - bounded) << 23), back = __int_as_float((bounded - 14) << 23);
  }
};

// Returns the larger magnitude, without infinities and NaN, for which no scale helps.
__device__ inline float larger_size(float most, float value) {
  return fabsf(value) < INFINITY ? fmaxf(most, fabsf(value)) : most;
}

// Splits two numbers into float16 values and their float16 residuals. The residual of a number that is not
// finite is NaN.
__device__ inline uint2 split(float low, float high) {
  const uint32_t first = to_halves(low, high);
  const auto left = [&](float value, uint32_t half) {
    return value - from_half(static_cast<uint16_t>(half));
  };
  return {first, to_halves(left(low, first), left(high, first >> 16))};
}

// Packs weights [outputs, inputs], times the scale of the dropout. Step s has the units 8 t + 4 s ... 8 t + 4
// s + 3. A warp packs a block of units.
template <int kBlocks>
__global__ void pack_weights(const float* weights, int inputs, int outputs, float scale, int unit_blocks,
                             uint4* packed) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t block = thread() / kWarp; block < unit_blocks; block += threads() / kWarp) {
    float values[kHeadSteps * kBlocks][4], most = 0;
    UEFL_UNROLL
    for (int i = 0; i < kHeadSteps * kBlocks * 4; ++i) {
      const int64_t unit = block * kUnits + lane % 4 * 8 + 4 * (i / 4 / kBlocks) + i % 4;
      const int output = lane / 8 * 2 * kBlocks + 2 * (i / 4 % kBlocks) + lane / 4 % 2;
      values[i / 4][i % 4] =
          output < outputs && unit < inputs ? weights[output * int64_t{inputs} + unit] * scale : 0.0f;
      most = larger_size(most, values[i / 4][i % 4]);
    }
    for (int mask = kWarp / 2; mask > 0; mask /= 2)
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, mask));
    const PowerOfTwo power(most);
    uint4* const target = packed + block * head_weights(kBlocks);
    UEFL_UNROLL
    for (int i = 0; i < kHeadSteps * kBlocks; ++i) {
      const uint2 a = split(values[i][0] * power.there, values[i][1] * power.there),
                  b = split(values[i][2] * power.there, values[i][3] * power.there);
      target[i * kWarp + lane] = {a.x, b.x, a.y, b.y};
    }
    if (lane == 0)
      target[kHeadSteps * kBlocks * kWarp] = {static_cast<uint32_t>(__float_as_int(power.back)), 0, 0, 0};
  }
}

// Packs rows. In a block, vector h of lane 4 g + t has the units 8 t ... 8 t + 7 of row g + 8 h, and vector 2
// + h has their rests. The factors for the products of rows g and g + 8 follow. A warp packs a block of units
// of a tile.
template <class T>
__global__ void pack_rows(const T* x, int64_t rows, int inputs, int64_t row_stride, int64_t stride,
                          int unit_blocks, const uint4* weights, int n, int64_t blocks, uint4* packed) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  for (int64_t i = thread() / kWarp; i < blocks; i += threads() / kWarp) {
    const int64_t block = i % unit_blocks, unit = block * kUnits + 8 * t;
    uint4* const target = packed + i * kHeadVectors;
    UEFL_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int64_t row = i / unit_blocks * kTileRows + g + 8 * h;
      float values[8], most = 0;
      UEFL_UNROLL
      for (int j = 0; j < 8; ++j) {
        values[j] = row < rows && unit + j < inputs ? widen(x[row * row_stride + (unit + j) * stride]) : 0.0f;
        most = larger_size(most, values[j]);
      }
      const PowerOfTwo power(row_max(most));
      uint2 pair[4];
      UEFL_UNROLL
      for (int j = 0; j < 4; ++j)
        pair[j] = split(values[2 * j] * power.there, values[2 * j + 1] * power.there);
      target[h * kWarp + lane] = {pair[0].x, pair[1].x, pair[2].x, pair[3].x};
      target[(2 + h) * kWarp + lane] = {pair[0].y, pair[1].y, pair[2].y, pair[3].y};
      const float of_weights =
          __int_as_float(static_cast<int>(weights[block * head_weights(n) + head_weights(n) - 1].x));
      if (t == 0) reinterpret_cast<float*>(target + kVectors)[2 * g + h] = power.back * of_weights;
    }
  }
}

// Returns sixteen ones for each half of a word that is not below the threshold, both halves at once. A
// subtraction without a borrow between the halves compares the lower 15 bits. The upper bit is the majority
// of the word's bit, that result, and the inverted bit of the threshold. Then it fills its half.
__device__ inline uint32_t kept(uint32_t word, const Halves& threshold) {
  const uint32_t not_below = (word | 0x80008000u) - threshold.low;
  uint32_t mask;
#if defined(__CUDACC__)
  asm("lop3.b32 %0, %1, %2, %3, 0xe8;"
      : "=r"(mask)
      : "r"(word), "r"(not_below), "r"(threshold.not_high));  // without asm, the compiler emits two of them
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(mask));
#else
  mask = (word & not_below) | (threshold.not_high & (word | not_below));
  mask = (mask >> 31) * 0xffff0000u | (mask >> 15 & 1) * 0xffffu;
#endif
  return mask;
}

// Adds the products of kept units and weights over one block of units to sums[pass][n8 block].
template <int kBlocks, int kRows>
__device__ inline void multiply_kept(const uint4* units, const PhiloxWords (&words)[kPasses][kRows],
                                     const Halves& threshold, const uint4* weights, int lane,
                                     float (&sums)[kPasses][kBlocks][4]) {
  uint32_t first[2][4], rest[2][4];
  UEFL_UNROLL
  for (int h = 0; h < 2; ++h) {
    const uint4 a = units[h * kWarp + lane], b = units[(2 + h) * kWarp + lane];
    first[h][0] = a.x, first[h][1] = a.y, first[h][2] = a.z, first[h][3] = a.w;
    rest[h][0] = b.x, rest[h][1] = b.y, rest[h][2] = b.z, rest[h][3] = b.w;
  }
  float part[kPasses][kBlocks][4] = {};
  UEFL_UNROLL
  for (int step = 0; step < kHeadSteps; ++step) {
    uint32_t kept_first[kPasses][4], kept_rest[kPasses][4];
    UEFL_UNROLL
    for (int p = 0; p < kPasses; ++p) {
      UEFL_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int h = i % 2, pair = 2 * step + i / 2;
        const uint32_t mask = kept(words[p][kRows == 1 ? 0 : h].word[pair], threshold);
        kept_first[p][i] = first[h][pair] & mask, kept_rest[p][i] = rest[h][pair] & mask;
      }
    }
    UEFL_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const uint4 w = weights[(step * kBlocks + block) * kWarp + lane];
      UEFL_UNROLL
      for (int p = 0; p < kPasses; ++p) multiply_add(part[p][block], kept_rest[p], w.x, w.y);
      UEFL_UNROLL
      for (int p = 0; p < kPasses; ++p) multiply_add(part[p][block], kept_first[p], w.z, w.w);
      UEFL_UNROLL
      for (int p = 0; p < kPasses; ++p) multiply_add(part[p][block], kept_first[p], w.x, w.y);
    }
  }
  const float2 scale = reinterpret_cast<const float2*>(units + kVectors)[lane / 4];
  UEFL_UNROLL
  for (int p = 0; p < kPasses; ++p) {
    UEFL_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i)
      sums[p][i / 4][i % 4] += part[p][i / 4][i % 4] * (i % 4 < 2 ? scale.x : scale.y);
  }
}

// The statistics of a row in a slot, for the classes of one lane.
template <int kClasses>
struct Statistics {
  float mean[kClasses] = {}, moment[kClasses] = {}, entropy = 0;

  // Adds the probabilities of a pass. share is 1 / passes so far, including this one.
  __device__ void add(const float (&powers)[kClasses], const Softmax& softmax, float share) {
    UEFL_UNROLL
    for (int j = 0; j < kClasses; ++j) {  // Welford's formula
      const float probability = powers[j] * softmax.inverse, deviation = probability - mean[j];
      mean[j] += deviation * share;
      moment[j] += deviation * (probability - mean[j]);
    }
    entropy += softmax.nats();
  }
  __device__ void store(const McProblem& problem, int64_t row, int first_class) const {
    const int64_t place = row * problem.padded_classes + first_class;
    UEFL_UNROLL
    for (int j = 0; j < kClasses; j += 4) {
      *reinterpret_cast<float4*>(problem.mean + place + j) = {mean[j], mean[j + 1], mean[j + 2], mean[j + 3]};
      *reinterpret_cast<float4*>(problem.moment + place + j) = {moment[j], moment[j + 1], moment[j + 2],
                                                                moment[j + 3]};
    }
    if (first_class == 0) problem.entropy[row] = entropy;
  }
};

// Drops logits of a row. Lane t has the classes from kClasses t on.
template <int kClasses>
__device__ inline void drop_logits(float (&logit)[kClasses], const McProblem& problem, uint32_t pass,
                                   uint32_t row, int t) {
  const PhiloxWords words = philox({{pass, row, 1, kClasses * t / 8u}}, static_cast<uint64_t>(*problem.seed));
  UEFL_UNROLL
  for (int j = 0; j < kClasses; ++j) {
    // Of 16 classes, a lane uses half a call: words 0 and 1, or words 2 and 3.
    const uint32_t word = kClasses == 8 || t % 2 == 0 ? words.word[j / 2] : words.word[(j / 2 + 2) % 4];
    if ((j % 2 ? word : word << 16) < problem.logit_threshold && kClasses * t + j < problem.classes)
      logit[j] = 0;
  }
}

// Runs the passes of a slot for a tile of rows. Four thread blocks on a multiprocessor leave a thread 128
// registers. Then the statistics spill once per pair of passes, but the loop does not.
template <int kBlocks, bool kConsistent>
__global__ void __launch_bounds__(kThreads, kBlocks == 2 ? 4 : 2) head(McProblem problem) {
  constexpr int kClasses = 2 * kBlocks;  // classes of a lane, in each of its two rows
  const volatile uint2* keys = round_keys(problem.seed);
  const TileSlot item(problem, thread() / kWarp);
  if (item.slot >= problem.slots) return;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const uint4* const units = problem.x + int64_t{item.tile} * problem.unit_blocks * kHeadVectors;
  const auto row = static_cast<uint32_t>(problem.first_row + int64_t{item.tile} * kTileRows + g);
  float bias[kClasses];
  UEFL_UNROLL
  for (int j = 0; j < kClasses; ++j)
    bias[j] = kClasses * t + j < problem.classes ? problem.bias[kClasses * t + j] : -INFINITY;

  Statistics<kClasses> statistics[2];
  float done = 0;
  for (uint32_t pair = problem.begin[item.slot]; pair < problem.begin[item.slot + 1]; ++pair) {
    const uint32_t pass = kPasses * pair;
    const Masks<kConsistent> masks(keys, pass, row, 0);
    float logits[kPasses][kBlocks][4] = {};
    const uint4 *block_units = units, *block_weights = problem.weights;
    for (int block = 0; block < problem.unit_blocks;
         ++block, block_units += kHeadVectors, block_weights += head_weights(kBlocks)) {
      PhiloxWords words[kPasses][Masks<kConsistent>::kRows];
      masks.draw(static_cast<uint32_t>(4 * block + t), words);
      multiply_kept<kBlocks>(block_units, words, problem.unit_threshold, block_weights, lane, logits);
    }
    UEFL_UNROLL
    for (int p = 0; p < kPasses; ++p) {
      if (pass + p >= problem.passes) break;
      const float share = 1 / ++done;  // exactly 1 after the first pass: one pass has no variance
      UEFL_UNROLL
      for (int h = 0; h < 2; ++h) {
        float logit[kClasses];
        UEFL_UNROLL
        for (int j = 0; j < kClasses; ++j)
          logit[j] = (logits[p][j / 2][2 * h + j % 2] + bias[j]) * problem.logit_scale;
        if (problem.logit_threshold > 0)
          drop_logits(logit, problem, pass + p, kConsistent ? 0 : row + 8 * h, t);
        Softmax softmax;
        UEFL_UNROLL
        for (int j = 0; j < kClasses; ++j) softmax.most = fmaxf(softmax.most, logit[j]);
        softmax.most = row_max(softmax.most);
        UEFL_UNROLL
        for (int j = 0; j < kClasses; ++j) logit[j] = softmax.add(logit[j]);  // becomes exp(logit - most)
        softmax.sum_up();
        statistics[h].add(logit, softmax, share);
      }
    }
  }
  UEFL_UNROLL
  for (int h = 0; h < 2; ++h) {
    statistics[h].store(problem, item.slot * problem.rows() + int64_t{item.tile} * kTileRows + g + 8 * h,
                        kClasses * t);
  }
}

// Combines the slots of a row, by Chan's formula for means and moments. A thread takes a row and a class, or
// the entropy of a row. It has the loads of eight slots under way.
__global__ void combine(McProblem problem, int64_t rows, float* mean_out, float* entropy_out,
                        float* variance_out) {
  constexpr int kLoads = 8;
  const int width = problem.classes + 1;
  const float all = static_cast<float>(problem.passes);
  for (int64_t i = thread(); i < rows * width; i += threads()) {
    const int64_t row = i / width, c = i - row * width;
    const bool of_entropy = c == problem.classes;
    const int64_t place = of_entropy ? row : row * problem.padded_classes + c,
                  step = problem.rows() * (of_entropy ? 1 : problem.padded_classes);
    const float *first = (of_entropy ? problem.entropy : problem.mean) + place,
                *second = of_entropy ? first : problem.moment + place;
    float mean = 0, moment = 0, entropy = 0;
    for (int slot = 0; slot < problem.slots; slot += kLoads) {
      float firsts[kLoads], seconds[kLoads];
      UEFL_UNROLL
      for (int k = 0; k < kLoads; ++k) {
        if (slot + k >= problem.slots) continue;
        firsts[k] = first[(slot + k) * step], seconds[k] = second[(slot + k) * step];
      }
      UEFL_UNROLL
      for (int k = 0; k < kLoads; ++k) {
        if (slot + k >= problem.slots) break;
        const float deviation = firsts[k] - mean, share = problem.share[slot + k];
        mean += deviation * share;
        moment += seconds[k] +
                  deviation * deviation * (static_cast<float>(kPasses * problem.begin[slot + k]) * share);
        entropy += firsts[k];
      }
    }
    if (of_entropy) {
      entropy_out[row] = entropy / all;
    } else {
      mean_out[row * problem.classes + c] = mean;
      variance_out[row * problem.classes + c] = moment / all;
    }
  }
}

__global__ void dropout_mask(const int64_t* seed, int64_t rows, int64_t columns, uint32_t pass,
                             uint32_t stream, uint32_t threshold, bool consistent, bool* keep) {
  const int64_t calls = (columns + kMcUnits - 1) / kMcUnits;
  for (int64_t i = thread(); i < rows * calls; i += threads()) {
    const int64_t row = i / calls, call = i % calls;
    const PhiloxWords words =
        philox({{pass, consistent ? 0 : static_cast<uint32_t>(row), stream, static_cast<uint32_t>(call)}},
               static_cast<uint64_t>(*seed));
    UEFL_UNROLL
    for (int64_t j = 0; j < kMcUnits; ++j) {
      if (call * kMcUnits + j >= columns) break;
      keep[row * columns + call * kMcUnits + j] = (words.word[j / 2] >> (j % 2 * 16) & 0xffffu) >= threshold;
    }
  }
}

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda
