// The plan of a call of mc_dropout_mlp on CUDA: its parts, its memory, and the order of its launches. It is
// plain C++, so that tests/cpp/test_cuda_mc_dropout.cpp runs what mc_dropout_mlp.cu launches.
#pragma once

#include <algorithm>

#include "cuda/mc_dropout_mlp_head.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

constexpr int64_t kSlabBytes = int64_t{256} << 20;  // largest workspace of a slab of rows
constexpr int64_t kNarrow = 16, kWide = 32;         // classes that head keeps in registers

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct McCall {
  int64_t inputs, classes;
  uint32_t threshold, logit_threshold;  // of 16 bits: of the inputs, and on the logits
  int64_t rows, passes;
  bool consistent;
};

struct Plan {
  int64_t rows, slab;                            // all rows; rows at once, a multiple of kTileRows
  int inputs, n;                                 // n: n8 blocks of outputs
  float scale;                                   // of the dropout before the layer
  int64_t weight_vectors, row_vectors, moments;  // sizes of McArrays
  McProblem problem{};                           // except pointers and the current slab

  // Tests pass another value of slab_bytes. There are at most kWide classes.
  explicit Plan(const McCall& call, int64_t slab_bytes = kSlabBytes)
      : rows(call.rows),
        inputs(static_cast<int>(call.inputs)),
        n(call.classes <= kNarrow ? 2 : 4),
        scale(dropout_scale(call.threshold)) {
    problem.unit_blocks = static_cast<int>(ceil_div(inputs, kUnits));
    problem.classes = static_cast<int>(call.classes), problem.padded_classes = 8 * n;
    problem.passes = static_cast<uint32_t>(call.passes), problem.consistent = call.consistent;
    share_passes();
    const uint32_t both = call.threshold * 0x10001u;
    problem.unit_threshold = {both & 0x7fff7fffu, ~both & 0x80008000u};
    problem.logit_threshold = call.logit_threshold << 16;
    problem.logit_scale = dropout_scale(call.logit_threshold);

    const int64_t tile_vectors = problem.unit_blocks * int64_t{kHeadVectors};
    const int64_t statistics = problem.slots * (2 * int64_t{problem.padded_classes} + 1);  // numbers of a row
    const int64_t row_bytes = tile_vectors * int64_t{sizeof(uint4)} / kTileRows + 4 * statistics;
    slab = std::min(ceil_div(rows, kTileRows), std::max<int64_t>(slab_bytes / row_bytes / kTileRows, 1)) *
           kTileRows;
    weight_vectors = problem.unit_blocks * int64_t{head_weights(n)};
    row_vectors = slab / kTileRows * tile_vectors, moments = slab * statistics;
  }

 private:
  // Divides the passes into slots. kSide slots share half of the pairs, the next slots share half of the
  // remaining pairs, and so on. This gives few slots, and short ones at the end.
  void share_passes() {
    const int64_t pairs = ceil_div(problem.passes, kPasses);
    for (int64_t begin = 0; begin < pairs;) {
      const int64_t left = pairs - begin;
      const int64_t share = problem.slots + kSide < kMostSlots ? std::max<int64_t>(left / (2 * kSide), 1)
                                                               : ceil_div(left, kSide);
      for (int i = 0; i < kSide && begin < pairs; ++i, begin += share)
        problem.begin[problem.slots++] = static_cast<uint32_t>(begin);
    }
    problem.begin[problem.slots] = static_cast<uint32_t>(pairs);
    for (int slot = 0; slot < problem.slots;
         ++slot) {  // the last pair of an odd number of passes is one pass
      const uint32_t done = kPasses * problem.begin[slot],
                     next = std::min(kPasses * problem.begin[slot + 1], problem.passes);
      problem.share[slot] = static_cast<float>(next - done) / static_cast<float>(next);
    }
    problem.side = std::min(kSide, problem.slots);
  }
};

struct McArrays {
  const float* parameters;  // the weights, then the bias
  const int64_t* seed;
  uint4 *weights, *rows;
  float* moments;
  float *mean, *entropy, *variance;  // the results
};

// Launches the kernels of a call. launch.over(threads, kernel, arguments) starts a kernel that loops.
// launch.all(...) starts one that has a thread for each element.
template <class T, class Launch>
void run(const Plan& plan, const McArrays& arrays, const T* x, int64_t row_stride, int64_t stride,
         const Launch& launch) {
  McProblem problem = plan.problem;
  const int64_t slot_rows = problem.slots * plan.slab, classes = problem.classes;
  problem.seed = arrays.seed, problem.x = arrays.rows, problem.weights = arrays.weights;
  problem.bias = arrays.parameters + classes * plan.inputs;
  problem.mean = arrays.moments;
  problem.moment = problem.mean + slot_rows * problem.padded_classes;
  problem.entropy = problem.moment + slot_rows * problem.padded_classes;
  const bool narrow = plan.n == 2;
  launch.over(problem.unit_blocks * int64_t{kWarp}, narrow ? pack_weights<2> : pack_weights<4>,
              arrays.parameters, plan.inputs, problem.classes, plan.scale, problem.unit_blocks,
              arrays.weights);
  const auto statistics = problem.consistent ? (narrow ? head<2, true> : head<4, true>)
                                             : (narrow ? head<2, false> : head<4, false>);
  for (int64_t first = 0; first < plan.rows; first += plan.slab) {
    const int64_t count = std::min(plan.slab, plan.rows - first);
    problem.first_row = first, problem.tiles = static_cast<int>(ceil_div(count, kTileRows));
    const int64_t blocks = int64_t{problem.tiles} * problem.unit_blocks;
    launch.over(blocks * kWarp, pack_rows<T>, x + first * row_stride, count, plan.inputs, row_stride, stride,
                problem.unit_blocks, static_cast<const uint4*>(arrays.weights), plan.n, blocks, arrays.rows);
    launch.all(problem.items() * kWarp, statistics, problem);
    launch.over(count * (classes + 1), combine, problem, count, arrays.mean + first * classes,
                arrays.entropy + first, arrays.variance + first * classes);
  }
}

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda
