// mc_dropout_mlp on CUDA, for sm_80 and later. A warp computes a share of the passes of 16 rows, with its
// masks in registers.
//
//   pack_...  writes rows and weights in the order of the lanes, padded with zeros; once per call
//   head      computes one layer with at most 32 outputs: only the statistics leave the registers
//             (mc_dropout_mlp_head.h)
//   stack     computes any number of layers and classes: the warp stores the activations of a pass in its own
//             memory, the same for all passes, so that each mask is drawn once
//   combine   combines the statistics of the slots
//
// A warp has a tile of 16 rows and a slot, which is a range of pairs of passes. Both passes of a pair share
// each load of rows and weights. The slots depend only on the number of passes, and combine adds them up in
// their order. So the results of a row have the same bits for any grid and any number of rows. The slots
// become shorter and shorter, and the longest slots of all tiles come first. So the work at the end is short,
// and no multiprocessor waits for long. Warps never wait for one another: a lane reads only values from
// itself or from an earlier kernel.
#pragma once

#include "cuda/mc_dropout_mlp_head.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

// Adds one row's probabilities of a pass to the statistics of its slot. `done` counts the passes so far,
// including this one.
template <int kClasses>
__device__ inline void add_row(const McProblem& problem, int64_t row, int first_class,
                               const float (&powers)[kClasses], const Softmax& softmax, float done) {
  const int64_t place = row * problem.padded_classes + first_class;
  float4 *const means = reinterpret_cast<float4*>(problem.mean + place), *const moments =
                                                                             reinterpret_cast<float4*>(
                                                                                 problem.moment + place);
  const float share = 1 / done;
  UEFL_UNROLL
  for (int i = 0; i < kClasses / 4; ++i) {
    float4 mean{}, moment{};
    if (done > 1) mean = means[i], moment = moments[i];
    update(powers[4 * i] * softmax.inverse, share, mean.x, moment.x);
    update(powers[4 * i + 1] * softmax.inverse, share, mean.y, moment.y);
    update(powers[4 * i + 2] * softmax.inverse, share, mean.z, moment.z);
    update(powers[4 * i + 3] * softmax.inverse, share, mean.w, moment.w);
    means[i] = mean, moments[i] = moment;
  }
  if (first_class == 0) problem.entropy[row] = softmax.nats() + (done > 1 ? problem.entropy[row] : 0);
}

// Adds one more pass to the statistics of a slot, from the logits in a buffer. A lane has classes 8 t ... 8 t
// + 7 of each block of 32.
__device__ inline void add_pass(const McProblem& problem, const float4* logits, int64_t first_row, float done,
                                int lane) {
  const int blocks = problem.padded_classes / kUnits, t = lane % 4;
  const auto logit = [&](const Units& units, int block, int h, int j) {
    return block * kUnits + 8 * t + j < problem.classes ? units.row[h][j] * problem.logit_scale : -INFINITY;
  };
  Softmax softmax[2];
  for (int block = 0; block < blocks; ++block) {
    const Units units = load_units(logits + int64_t{block} * kVectors, lane);
    UEFL_UNROLL
    for (int i = 0; i < 16; ++i)
      softmax[i / 8].most = fmaxf(softmax[i / 8].most, logit(units, block, i / 8, i % 8));
  }
  UEFL_UNROLL
  for (int h = 0; h < 2; ++h) softmax[h].most = row_max(softmax[h].most);
  for (int block = 0; block < blocks; ++block) {
    const Units units = load_units(logits + int64_t{block} * kVectors, lane);
    UEFL_UNROLL
    for (int i = 0; i < 16; ++i) softmax[i / 8].add(logit(units, block, i / 8, i % 8));
  }
  UEFL_UNROLL
  for (int h = 0; h < 2; ++h) softmax[h].sum_up();
  for (int block = 0; block < blocks; ++block) {
    Units units = load_units(logits + int64_t{block} * kVectors, lane);
    UEFL_UNROLL
    for (int h = 0; h < 2; ++h) {
      UEFL_UNROLL
      for (int j = 0; j < 8; ++j) units.row[h][j] = softmax[h].power(logit(units, block, h, j));
      add_row(problem, first_row + lane / 4 + 8 * h, block * kUnits + 8 * t, units.row[h], softmax[h], done);
    }
  }
}

__device__ inline float activate(McActivation activation, float x) {
  switch (activation) {
    case McActivation::relu:
      return x < 0 ? 0 : x;  // a NaN stays
    case McActivation::silu:
      return x / (1 + expf(-x));
    case McActivation::tanh:
      return tanhf(x);
    default:
      return 0.5f * x * (1 + erff(x * 0.70710678f));
  }
}

// Adds the bias to the sums of block o of a layer's outputs. Activates them unless they are logits.
__device__ inline void finish_units(const float (&sums)[kPasses][kWideOutputs][4], const McProblem& problem,
                                    int i, int o, int t, Units (&units)[kPasses]) {
  const Layer& layer = problem.layers[i];
  UEFL_UNROLL
  for (int k = 0; k < 16; ++k) {
    const int output = o * kUnits + 8 * t + k % 8;
    const float bias = output < layer.outputs ? layer.bias[output] : 0.0f;
    UEFL_UNROLL
    for (int p = 0; p < kPasses; ++p) {
      const float sum = sums[p][k % 8 / 2][k / 8 * 2 + k % 2] + bias;
      units[p].row[k / 8][k % 8] = i + 1 < problem.depth ? activate(problem.activation, sum) : sum;
    }
  }
}

// Runs the passes of a slot for a tile of rows, for each item of work. In `buffers`, each warp of the grid
// has two buffers of kPasses times `width` blocks.
template <bool kConsistent>
__global__ void __launch_bounds__(kThreads, 2) stack(McProblem problem, float4* buffers, int width) {
  const volatile uint2* keys = round_keys(problem.seed);
  const int lane = threadIdx.x % kWarp, t = lane % 4;
  const int64_t buffer_size = int64_t{kPasses} * width * kVectors;
  float4* const own = buffers + thread() / kWarp * 2 * buffer_size;
  const auto at = [&](int64_t stage, int p, int64_t block) {
    return own + stage % 2 * buffer_size + (p * int64_t{width} + block) * kVectors;
  };
  for (int64_t work = thread() / kWarp; work < problem.items(); work += threads() / kWarp) {
    const auto [tile, slot] = TileSlot(problem, work);
    if (slot >= problem.slots) continue;
    float done = 0;
    for (uint32_t pair = problem.begin[slot]; pair < problem.begin[slot + 1]; ++pair) {
      const uint32_t pass = kPasses * pair;
      const int64_t first_row = int64_t{tile} * kTileRows;
      const auto row = static_cast<uint32_t>(problem.first_row + first_row + lane / 4);
      // Applies the dropout of a stage, which is before a layer or on the logits, and stores the units.
      const auto enter = [&](int stage, int block, Units(&units)[kPasses]) {
        const uint32_t threshold = problem.thresholds[stage];
        if (threshold > 0) {
          const Masks<kConsistent> masks(keys, pass, row, static_cast<uint32_t>(stage));
          masks.drop(units, threshold, static_cast<uint32_t>(4 * block + t));
        }
        UEFL_UNROLL
        for (int p = 0; p < kPasses; ++p) store_units(units[p], at(stage, p, block), lane);
      };
      for (int block = 0; block < problem.unit_blocks; ++block) {
        Units units[kPasses];
        units[0] = units[1] =
            load_units(problem.x + (int64_t{tile} * problem.unit_blocks + block) * kVectors, lane);
        enter(0, block, units);
      }
      for (int i = 0; i < problem.depth; ++i) {
        const Layer& layer = problem.layers[i];
        for (int o = 0; o < layer.output_blocks; ++o) {
          float sums[kPasses][kWideOutputs][4] = {};
          for (int block = 0; block < layer.unit_blocks; ++block) {
            const Units units[kPasses] = {load_units(at(i, 0, block), lane),
                                          load_units(at(i, 1, block), lane)};
            const int64_t place = int64_t{o} * layer.unit_blocks + block;
            multiply_block<kWideOutputs>(units, layer.weights + place * (4 * kWideOutputs * kWarp), lane,
                                         sums);
          }
          Units units[kPasses];
          finish_units(sums, problem, i, o, t, units);
          enter(i + 1, o, units);
        }
      }
      for (int p = 0; p < kPasses && pass + p < problem.passes; ++p) {
        add_pass(problem, at(problem.depth, p, 0), slot * problem.rows() + first_row, ++done, lane);
      }
    }
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
