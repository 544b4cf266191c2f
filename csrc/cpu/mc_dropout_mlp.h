// Monte Carlo dropout of the last layers of an MLP on the CPU. It computes the passes, the softmax and the
// statistics of a tile of rows, with one row per lane.
//
// In each pass, the inputs of each layer are kept or dropped, multiplied by the weights and activated. The
// last logits become probabilities and enter the running statistics. Masks come from Philox, as
// ops/mc_dropout_mlp/composed.py defines them, in a buffer of one tile. A tile of rows belongs to one thread
// and its passes run in order, so results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/mc_dropout_mlp_kernel.h"
#include "cpu/strided_rows.h"

namespace uefl::cpu {

struct McStats {
  float* mean;              // [B, C] of the probabilities over the passes
  float* expected_entropy;  // [B] mean of the passes' entropies, in nats
  float* variance;          // [B, C] population variance of the probabilities over the passes
};

class McDropout {
 public:
  // `widths` has the inputs of the MLP and the outputs of each layer. `parameters` has for each layer the
  // weights [out, in] and the bias [out], one after the other. `thresholds` has one for the input and one for
  // the output of each layer: a unit is dropped if its 16 random bits are below it. All are copied.
  McDropout(const std::vector<int64_t>& widths, const float* parameters,
            const std::vector<uint32_t>& thresholds, McActivation activation, int64_t passes, bool consistent,
            uint64_t seed);

  // Returns the rows that are computed together. A task begins and ends at a multiple of it.
  int64_t group_rows() const;

  // Computes rows [lo, hi) of x. lo is a multiple of group_rows(). Thread-safe.
  void run(const StridedRows& x, int64_t lo, int64_t hi, const McStats& out) const;

 private:
  std::vector<std::vector<float>> packed_;
  std::vector<McLayer> layers_;
  McModel model_;
};

// Writes keep[row * columns + column] of rows [lo, hi) in one pass and stream, as the reference draws it.
void dropout_mask(uint64_t seed, int64_t lo, int64_t hi, int64_t columns, uint32_t pass, uint32_t stream,
                  uint32_t threshold, bool consistent, bool* keep);

}  // namespace uefl::cpu
