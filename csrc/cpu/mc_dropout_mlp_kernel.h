// The passes of MC dropout over one group of rows.
#pragma once

#include <cstdint>

#include "common/mc_dropout.h"

namespace uefl::cpu {

constexpr int64_t kMcPasses = 2;  // passes that share a load of the weights
constexpr int64_t kMcGroup = 8;   // tiles that share a draw if all rows have the same masks

struct McLayer {
  int64_t inputs, outputs;
  int64_t block;         // outputs that are summed together; the last block may extend past the layer
  uint32_t threshold;    // of the dropout on the inputs; 0 for none
  const float* weights;  // [blocks, inputs, block], multiplied by the scale of the dropout
  const float* bias;     // [blocks, block]
};

struct McModel {
  const McLayer* layers;
  int64_t depth, inputs, width;  // depth 0: the inputs are the logits; width: the largest number of inputs of
                                 // a layer, or of outputs in whole blocks
  uint32_t logit_threshold;
  float logit_scale;
  McActivation activation;
  int64_t passes, classes;
  bool consistent;
  uint64_t seed;
};

// A group of tiles. A tile has one row per vector lane. All arrays are vectors of floats, with one row per
// lane.
struct McGroup {
  int64_t first_row, tiles;
  float* input;     // [tiles, inputs]; given
  float* hidden;    // [2, passes, width]; workspace
  uint32_t* words;  // [depth + 1, passes, width / 2]; workspace, two units per word
  float* mean;      // [tiles, classes]; results, zero at the start
  float* moment;    // [tiles, classes]: sum of the squared deviations from the mean
  float* entropy;   // [tiles]: sum of the entropies of the passes
};

struct McKernel {
  int64_t lanes;
  int64_t most_outputs;  // the largest block that stays in registers
  void (*run)(const McModel& model, const McGroup& group);
};

extern const McKernel mc_portable, mc_avx2, mc_avx512;

}  // namespace uefl::cpu
