// The passes of MC dropout over one group of rows.
#include "cpu/mc_dropout_mlp_kernel.h"
#include "cpu/simd.h"
#include "cpu/variant.h"

namespace uefl::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kMostOutputs = 12;  // plus the same number of sums for the second pass: 24 of the 32 registers
#else
constexpr int kMostOutputs = 6;
#endif

inline Floats* vectors(float* data) { return reinterpret_cast<Floats*>(data); }

// Draws the random words of the inputs of one layer (or of the logits) in one pass, for a tile. words[w]
// holds units 2 w (low half) and 2 w + 1.
//
// The counter is (pass, row, stream, unit / 8), so most of the first three rounds is the same for all rows or
// for all units. That part is computed once. A call then takes seven rounds and two exclusive ors.
UEFL_INLINE void draw(uint64_t seed, bool consistent, int64_t first_row, uint32_t pass, uint32_t stream,
                      int64_t units, Words* words) {
  uint32_t key0[kPhiloxRounds], key1[kPhiloxRounds];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    key0[round] = static_cast<uint32_t>(seed) + static_cast<uint32_t>(round) * kPhiloxWeyl0;
    key1[round] = static_cast<uint32_t>(seed >> 32) + static_cast<uint32_t>(round) * kPhiloxWeyl1;
  }
  const uint64_t from_stream = uint64_t{kPhiloxMultiplier1} * stream,
                 from_pass = uint64_t{kPhiloxMultiplier0} * pass;
  // These products of rounds 2 and 3 do not depend on the unit. They are separate for even and for odd rows.
  Longs first[2] = {}, second[2] = {};
  for (int odd = 0; odd < 2; ++odd) {
    Longs word0 = {};
    for (int i = 0; i < kLanes / 2; ++i) {
      const uint32_t row = consistent ? 0 : static_cast<uint32_t>(first_row + 2 * i + odd);
      word0[i] = static_cast<uint32_t>(from_stream >> 32) ^ row ^ key0[0];
    }
    multiply(word0, kPhiloxMultiplier0, first[odd]);
    const Longs word2 = (first[odd] >> 32) ^ (static_cast<uint32_t>(from_pass) ^ key1[1]);
    multiply(word2, kPhiloxMultiplier1, second[odd]);
  }
  for (int64_t block = 0; block * kMcUnits < units; ++block, words += kMcWords) {
    const uint64_t two = uint64_t{kPhiloxMultiplier1} *
                         (static_cast<uint32_t>(from_pass >> 32) ^ static_cast<uint32_t>(block) ^ key1[0]);
    const uint64_t three = uint64_t{kPhiloxMultiplier0} *
                           (static_cast<uint32_t>(two >> 32) ^ static_cast<uint32_t>(from_stream) ^ key0[1]);
    Longs word[2][4];
    for (int odd = 0; odd < 2; ++odd) {
      word[odd][0] = (second[odd] >> 32) ^ (static_cast<uint32_t>(two) ^ key0[2]);
      word[odd][1] = second[odd];
      word[odd][2] = first[odd] ^ (static_cast<uint32_t>(three >> 32) ^ key1[2]);
      word[odd][3] = Longs{} + static_cast<uint32_t>(three);
    }
    for (int round = 3; round < kPhiloxRounds; ++round) {
      for (int odd = 0; odd < 2; ++odd) {
        Longs low, high;
        multiply(word[odd][0], kPhiloxMultiplier0, low);
        multiply(word[odd][2], kPhiloxMultiplier1, high);
        word[odd][0] = (high >> 32) ^ word[odd][1] ^ key0[round];
        word[odd][1] = high;
        word[odd][2] = (low >> 32) ^ word[odd][3] ^ key1[round];
        word[odd][3] = low;
      }
    }
    for (int w = 0; w < kMcWords; ++w) interleave(word[0][w], word[1][w], words[w]);
  }
}

// Adds weights * inputs to sums[pass][output], over the units that the words keep. Threshold 0 keeps all.
template <int OUTPUTS, int PASSES, bool DROP>
UEFL_INLINE void accumulate(const McLayer& layer, const float* weights, const Floats* input,
                            int64_t input_step, const Words* words, int64_t words_step, Floats* sums,
                            int64_t sums_step) {
  Floats sum[PASSES][OUTPUTS];
  for (int pass = 0; pass < PASSES; ++pass) {
    for (int o = 0; o < OUTPUTS; ++o) sum[pass][o] = sums[pass * sums_step + o];
  }
  const uint32_t threshold = layer.threshold << 16;
  const auto add = [&](int64_t unit, int half) {
    Floats kept[PASSES];
    for (int pass = 0; pass < PASSES; ++pass) {
      kept[pass] = input[pass * input_step + unit];
      if (DROP) {
        const Words pair = words[pass * words_step + unit / 2];
        keep_from(half ? pair : pair << 16, threshold, kept[pass]);
      }
    }
    for (int o = 0; o < OUTPUTS; ++o) {
      for (int pass = 0; pass < PASSES; ++pass)
        multiply_add(kept[pass], weights[unit * OUTPUTS + o], sum[pass][o]);
    }
  };
  int64_t unit = 0;
  for (; unit + 1 < layer.inputs; unit += 2) add(unit, 0), add(unit + 1, 1);
  if (unit < layer.inputs) add(unit, 0);
  for (int pass = 0; pass < PASSES; ++pass) {
    for (int o = 0; o < OUTPUTS; ++o) sums[pass * sums_step + o] = sum[pass][o];
  }
}

template <int PASSES, int OUTPUTS = kMostOutputs>
void multiply_block(const McLayer& layer, const float* weights, const Floats* input, int64_t input_step,
                    const Words* words, int64_t words_step, Floats* sums, int64_t sums_step) {
  if constexpr (OUTPUTS > 1) {
    if (layer.block < OUTPUTS) {
      return multiply_block<PASSES, OUTPUTS - 1>(layer, weights, input, input_step, words, words_step, sums,
                                                 sums_step);
    }
  }
  if (layer.threshold) {
    accumulate<OUTPUTS, PASSES, true>(layer, weights, input, input_step, words, words_step, sums, sums_step);
  } else {
    accumulate<OUTPUTS, PASSES, false>(layer, weights, input, input_step, words, words_step, sums, sums_step);
  }
}

// Adds the probabilities of one pass to the statistics (Welford's update).
UEFL_INLINE void add_pass(const McModel& model, Floats* logits, const Words* words, int64_t pass,
                          Floats* mean, Floats* moment, Floats& entropy) {
  if (model.logit_threshold) {
    for (int64_t c = 0; c < model.classes; ++c) {
      keep_from(c % 2 ? words[c / 2] : words[c / 2] << 16, model.logit_threshold << 16, logits[c]);
      logits[c] *= model.logit_scale;
    }
  }
  Floats most = logits[0], sum = {}, weighted = {};
  for (int64_t c = 1; c < model.classes; ++c) most = logits[c] > most ? logits[c] : most;
  for (int64_t c = 0; c < model.classes; ++c) {
    Floats below = logits[c] - most;
    below = below < kLeastExponent ? Floats{} + kLeastExponent : below;
    exponential(below, logits[c]);
    sum += logits[c];
    weighted += logits[c] * below;
  }
  const Floats inverse = 1.0f / sum;
  const float share = 1.0f / static_cast<float>(pass + 1);
  Floats nats;
  logarithm(sum, nats);
  entropy += nats - weighted * inverse;
  for (int64_t c = 0; c < model.classes; ++c) {
    const Floats prob = logits[c] * inverse, deviation = prob - mean[c];
    mean[c] += deviation * share;
    moment[c] += deviation * (prob - mean[c]);
  }
}

template <int PASSES>
void run_passes(const McModel& model, const McGroup& group, int64_t pass) {
  const int64_t words_step = model.width / 2;  // in vectors, as the other steps
  Floats* const buffers[2] = {vectors(group.hidden), vectors(group.hidden) + kMcPasses * model.width};
  Words* const all_words = reinterpret_cast<Words*>(group.words);
  for (int64_t tile = 0; tile < group.tiles; ++tile) {
    const Floats* input = vectors(group.input) + tile * model.inputs;
    // All passes start from the same input.
    int64_t input_step = 0;
    const auto words_of = [&](int64_t stream) { return all_words + stream * kMcPasses * words_step; };
    const auto draw_stream = [&](int64_t stream, int64_t units, uint32_t threshold) {
      if (threshold == 0 || (model.consistent && tile > 0)) return;
      for (int p = 0; p < PASSES; ++p) {
        draw(model.seed, model.consistent, group.first_row + tile * kLanes, static_cast<uint32_t>(pass + p),
             static_cast<uint32_t>(stream), units, words_of(stream) + p * words_step);
      }
    };
    Floats* output = buffers[0];
    if (model.depth == 0) {
      for (int p = 0; p < PASSES; ++p) {
        for (int64_t c = 0; c < model.classes; ++c) output[p * model.width + c] = input[c];
      }
    }
    for (int64_t i = 0; i < model.depth; ++i) {
      const McLayer& layer = model.layers[i];
      output = buffers[i % 2];
      draw_stream(i, layer.inputs, layer.threshold);
      for (int64_t o = 0; o < layer.outputs; o += layer.block) {
        for (int64_t j = 0; j < layer.block; ++j) {
          for (int p = 0; p < PASSES; ++p) output[p * model.width + o + j] = Floats{} + layer.bias[o + j];
        }
        multiply_block<PASSES>(layer, layer.weights + o * layer.inputs, input, input_step, words_of(i),
                               words_step, output + o, model.width);
      }
      if (i + 1 < model.depth) {
        for (int p = 0; p < PASSES; ++p) {
          for (int64_t o = 0; o < layer.outputs; ++o) activate(model.activation, output[p * model.width + o]);
        }
      }
      input = output;
      input_step = model.width;
    }
    draw_stream(model.depth, model.classes, model.logit_threshold);
    for (int p = 0; p < PASSES; ++p) {
      add_pass(model, output + p * model.width, words_of(model.depth) + p * words_step, pass + p,
               vectors(group.mean) + tile * model.classes, vectors(group.moment) + tile * model.classes,
               vectors(group.entropy)[tile]);
    }
  }
}

void run(const McModel& model, const McGroup& group) {
  int64_t pass = 0;
  for (; pass + kMcPasses <= model.passes; pass += kMcPasses) run_passes<kMcPasses>(model, group, pass);
  if (pass < model.passes) run_passes<1>(model, group, pass);
}

}  // namespace

const McKernel UEFL_VARIANT(mc){kLanes, kMostOutputs, run};

}  // namespace uefl::cpu
