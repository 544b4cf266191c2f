// The plan of a call of mc_dropout_mlp on CUDA: its parts, its memory, and the order of its launches. It is
// plain C++, so that tests/cpp/test_cuda_mc_dropout.cpp runs what mc_dropout_mlp.cu launches.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda/mc_dropout_mlp_kernels.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

// Limits of the memory. The workspace of a slab of rows stays below kSlabBytes. The activations between the
// layers of `stack` stay below kBufferBytes, so that they are in the second-level cache.
constexpr int64_t kSlabBytes = int64_t{256} << 20, kBufferBytes = int64_t{64} << 20;
constexpr int64_t kNarrow = 16, kWide = 32;  // classes that head keeps in registers

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Call {
  std::vector<int64_t> widths;       // of the inputs, and of each layer's outputs
  std::vector<uint32_t> thresholds;  // of 16 bits: before each layer, and on the logits
  int64_t rows, passes;
  McActivation activation;
  bool consistent;
};

struct Plan {
  int64_t rows, slab;  // all rows; rows at once, a multiple of kTileRows
  bool small;          // head runs, otherwise stack
  int n;               // n8 blocks in a block of outputs
  int inputs, width;   // of x; blocks of the widest layer
  int64_t tile_vectors, tail_warps;
  int64_t weight_vectors, row_vectors, buffer_vectors, moments;  // sizes of Arrays
  float scales[kMostLayers];                                     // of the dropout before each layer
  McProblem problem{};                                           // except pointers and the current slab

  // Tests pass other values of slab_bytes and buffer_bytes. The depth is at most kMostLayers.
  explicit Plan(const Call& call, int64_t slab_bytes = kSlabBytes, int64_t buffer_bytes = kBufferBytes)
      : rows(call.rows) {
    const int64_t depth = static_cast<int64_t>(call.widths.size()) - 1, classes = call.widths.back();
    small = depth == 1 && classes <= kWide;
    n = small && classes <= kNarrow ? 2 : kWideOutputs, inputs = static_cast<int>(call.widths[0]);
    problem.unit_blocks = static_cast<int>(ceil_div(inputs, kUnits)), problem.depth = static_cast<int>(depth);
    problem.classes = static_cast<int>(classes),
    problem.padded_classes = static_cast<int>(ceil_div(classes, 8 * n) * 8 * n);
    problem.passes = static_cast<uint32_t>(call.passes), problem.activation = call.activation,
    problem.consistent = call.consistent;
    share_passes();
    for (int64_t i = 0; i <= depth; ++i) problem.thresholds[i] = call.thresholds[i] << 16;
    problem.logit_scale = dropout_scale(call.thresholds[depth]);
    const uint32_t both = call.thresholds[0] * 0x10001u;
    problem.halves = {both & 0x7fff7fffu, ~both & 0x80008000u};

    width = problem.unit_blocks, weight_vectors = 0;
    for (int64_t i = 0; i < depth; ++i) {
      Layer& layer = problem.layers[i];
      layer.inputs = static_cast<int>(call.widths[i]), layer.outputs = static_cast<int>(call.widths[i + 1]);
      layer.unit_blocks = static_cast<int>(ceil_div(layer.inputs, kUnits));
      layer.output_blocks = static_cast<int>(ceil_div(layer.outputs, 8 * n));
      scales[i] = dropout_scale(call.thresholds[i]);
      weight_vectors += vectors_of(layer);
      width = std::max(width, layer.output_blocks);
    }
    tile_vectors = problem.unit_blocks * int64_t{small ? kHeadVectors : kVectors};
    const int64_t statistics = problem.slots * (2 * int64_t{problem.padded_classes} + 1);  // numbers of a row
    const int64_t row_bytes = tile_vectors * int64_t{sizeof(float4)} / kTileRows + 4 * statistics;
    slab = std::min(ceil_div(rows, kTileRows), std::max<int64_t>(slab_bytes / row_bytes / kTileRows, 1)) *
           kTileRows;
    row_vectors = slab / kTileRows * tile_vectors, moments = slab * statistics;
    const int64_t warp_vectors = 2 * kPasses * width * int64_t{kVectors},
                  most = slab / kTileRows * problem.slots;
    tail_warps = std::clamp<int64_t>(buffer_bytes / (warp_vectors * int64_t{sizeof(float4)}), 1, most);
    tail_warps = ceil_div(tail_warps, kThreads / kWarp) * (kThreads / kWarp);  // whole blocks
    buffer_vectors = small ? 0 : tail_warps * warp_vectors;
  }

  int64_t vectors_of(const Layer& layer) const {
    return int64_t{layer.output_blocks} * layer.unit_blocks * (small ? head_weights(n) : 4 * n * kWarp);
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

struct Arrays {
  const float* parameters;
  const int64_t* seed;
  float4 *weights, *rows, *buffers;
  float* moments;
  float *mean, *entropy, *variance;  // the results
};

// Launches the kernels of a call. launch.over(threads, kernel, arguments) starts a kernel that loops.
// launch.all(...) starts one that has a thread for each element.
template <class T, class Launch>
void run(const Plan& plan, const Arrays& arrays, const T* x, int64_t row_stride, int64_t stride,
         const Launch& launch) {
  McProblem problem = plan.problem;
  problem.seed = arrays.seed, problem.x = arrays.rows;
  const float* source = arrays.parameters;
  float4* target = arrays.weights;
  for (int i = 0; i < problem.depth; ++i) {
    Layer& layer = problem.layers[i];
    const int64_t count = plan.vectors_of(layer);
    if (plan.small) {
      launch.over(layer.unit_blocks * int64_t{kWarp},
                  plan.n == 2 ? pack_head_weights<2> : pack_head_weights<4>, source, layer.inputs,
                  layer.outputs, plan.scales[i], layer.unit_blocks, reinterpret_cast<uint4*>(target));
    } else {
      launch.over(count, pack_weights, source, layer.inputs, layer.outputs, plan.n, plan.scales[i],
                  layer.unit_blocks, count, target);
    }
    layer.weights = target, layer.bias = source + int64_t{layer.inputs} * layer.outputs;
    target += count, source = layer.bias + layer.outputs;
  }
  const int64_t slot_rows = problem.slots * plan.slab, classes = problem.classes;
  problem.mean = arrays.moments;
  problem.moment = problem.mean + slot_rows * problem.padded_classes;
  problem.entropy = problem.moment + slot_rows * problem.padded_classes;

  for (int64_t first = 0; first < plan.rows; first += plan.slab) {
    const int64_t count = std::min(plan.slab, plan.rows - first);
    problem.first_row = first, problem.tiles = static_cast<int>(ceil_div(count, kTileRows));
    const int64_t blocks = int64_t{problem.tiles} * problem.unit_blocks;
    const T* const rows = x + first * row_stride;
    if (plan.small) {
      launch.over(blocks * kWarp, pack_head_rows<T>, rows, count, plan.inputs, row_stride, stride,
                  problem.unit_blocks, reinterpret_cast<const uint4*>(arrays.weights), plan.n, blocks,
                  reinterpret_cast<uint4*>(arrays.rows));
    } else {
      launch.over(blocks * kVectors, pack_rows<T>, rows, count, plan.inputs, row_stride, stride,
                  problem.unit_blocks, blocks * kVectors, arrays.rows);
    }
    const auto statistics = [&](auto narrow, auto wide, auto deep) {
      if (plan.small) return launch.all(problem.items() * kWarp, plan.n == 2 ? narrow : wide, problem);
      launch.over(plan.tail_warps * kWarp, deep, problem, arrays.buffers, plan.width);
    };
    problem.consistent ? statistics(head<2, true>, head<4, true>, stack<true>)
                       : statistics(head<2, false>, head<4, false>, stack<false>);
    launch.over(count * (classes + 1), combine, problem, count, arrays.mean + first * classes,
                arrays.entropy + first, arrays.variance + first * classes);
  }
}

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda
