// Launches of mc_dropout_mlp_kernels.h, and what torch sees of them. Not run on a GPU yet.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "common/check_mc_dropout.h"
#include "cuda/mc_dropout_mlp_kernels.h"
#include "cuda/stream.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows are taken in slabs whose workspace stays below the first; what the layers of tail hand on should stay in the second-level cache.
constexpr int64_t kSlabBytes = int64_t{256} << 20, kBufferBytes = int64_t{64} << 20;
constexpr int64_t kNarrow = 16, kWide = 32;  // classes that head keeps in registers

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for so many threads, within the limit of a grid: what a thread does for one item it does for many.
unsigned blocks(int64_t threads) { return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(threads, kThreads), 1, 1 << 20)); }

Tensor vectors(const Tensor& like, int64_t count) { return torch::stable::new_empty(like, {4 * count}, ScalarType::Float); }

template <class Body>
void with_type(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Half:
      return body(__half{});
    default:  // the checks have seen the others off
      return body(__nv_bfloat16{});
  }
}

std::tuple<Tensor, Tensor, Tensor> mc_dropout_mlp(const Tensor& x, const Tensor& parameters_given, std::vector<int64_t> widths,
                                                  std::vector<double> p, int64_t passes, std::string activation, bool consistent,
                                                  const Tensor& seed) {
  check_mc_dropout(x, parameters_given, widths, p, passes, activation, seed);
  const int64_t depth = static_cast<int64_t>(widths.size()) - 1, rows = x.size(0), inputs = widths[0], classes = widths.back();
  STD_TORCH_CHECK(depth <= kMostLayers, "mc_dropout_mlp: the CUDA kernel takes at most ", kMostLayers,
                  " layers after the first dropout, got ", depth, "; use backend 'reference'");
  STD_TORCH_CHECK(passes <= INT32_MAX, "mc_dropout_mlp: the CUDA kernel takes at most 2^31 - 1 passes, got ", passes);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor parameters = torch::stable::contiguous(parameters_given);
  Tensor mean = torch::stable::new_empty(x, {rows, classes}, ScalarType::Float);
  Tensor entropy = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  Tensor variance = torch::stable::new_empty(x, {rows, classes}, ScalarType::Float);
  if (rows == 0) return {mean, entropy, variance};
  const cudaStream_t stream = current_stream(x);

  const bool small = depth == 1 && classes <= kWide;
  const int n = small && classes <= kNarrow ? 2 : kWideOutputs;
  Problem problem{};
  problem.unit_blocks = static_cast<int>(ceil_div(inputs, kUnits)), problem.depth = static_cast<int>(depth);
  problem.classes = static_cast<int>(classes), problem.padded_classes = static_cast<int>(ceil_div(classes, 8 * n) * 8 * n);
  problem.passes = static_cast<uint32_t>(passes);
  problem.slots = static_cast<int>(std::min<int64_t>(kMostSlots, ceil_div(passes, kPasses)));
  problem.activation = activation_of(activation), problem.consistent = consistent;
  problem.seed = static_cast<const int64_t*>(seed.const_data_ptr());
  std::vector<uint32_t> thresholds;
  for (const double rate : p) thresholds.push_back(dropout_threshold(rate));
  for (int64_t i = 0; i <= depth; ++i) problem.thresholds[i] = thresholds[i] << 16;
  problem.logit_scale = dropout_scale(thresholds[depth]);

  int64_t width = problem.unit_blocks, weight_vectors = 0;
  for (int64_t i = 0; i < depth; ++i) {
    const int64_t unit_blocks = ceil_div(widths[i], kUnits), output_blocks = ceil_div(widths[i + 1], 8 * n);
    problem.layers[i] = {static_cast<int>(widths[i]),
                         static_cast<int>(widths[i + 1]),
                         static_cast<int>(unit_blocks),
                         static_cast<int>(output_blocks),
                         nullptr,
                         nullptr};
    weight_vectors += output_blocks * unit_blocks * 4 * n * kWarp;
    width = std::max(width, output_blocks);
  }
  Tensor packed = vectors(x, weight_vectors);
  const float* source = static_cast<const float*>(parameters.const_data_ptr());
  float4* target = static_cast<float4*>(packed.mutable_data_ptr());
  for (int64_t i = 0; i < depth; ++i) {
    Layer& layer = problem.layers[i];
    const int64_t count = int64_t{layer.output_blocks} * layer.unit_blocks * 4 * n * kWarp;
    pack_weights<<<blocks(count), kThreads, 0, stream>>>(source, layer.inputs, layer.outputs, n, dropout_scale(thresholds[i]),
                                                         layer.unit_blocks, count, target);
    layer.weights = target, layer.bias = source + widths[i] * widths[i + 1];
    target += count, source += widths[i + 1] * (widths[i] + 1);
  }

  const int64_t row_bytes = 4 * (problem.unit_blocks * int64_t{kUnits} + problem.slots * (2 * int64_t{problem.padded_classes} + 1));
  const int64_t slab = std::min(ceil_div(rows, kTileRows), std::max<int64_t>(kSlabBytes / row_bytes / kTileRows, 1)) * kTileRows;
  const int64_t tile_vectors = problem.unit_blocks * int64_t{kVectors}, slot_rows = problem.slots * slab;
  Tensor rows_packed = vectors(x, slab / kTileRows * tile_vectors);
  Tensor moments = torch::stable::new_empty(x, {slot_rows * (2 * problem.padded_classes + 1)}, ScalarType::Float);
  problem.x = static_cast<const float4*>(rows_packed.const_data_ptr());
  problem.mean = static_cast<float*>(moments.mutable_data_ptr());
  problem.moment = problem.mean + slot_rows * problem.padded_classes;
  problem.entropy = problem.moment + slot_rows * problem.padded_classes;
  const int64_t warp_vectors = 2 * kPasses * width * kVectors;
  const int64_t tail_warps = std::clamp<int64_t>(kBufferBytes / (warp_vectors * int64_t{sizeof(float4)}), 4, slot_rows / kTileRows + 3);
  const unsigned tail_blocks = blocks(tail_warps / 4 * kThreads);
  Tensor buffers = vectors(x, small ? 0 : tail_blocks * int64_t{kThreads / kWarp} * warp_vectors);

  for (int64_t first = 0; first < rows; first += slab) {
    const int64_t count = std::min(slab, rows - first);
    problem.first_row = first, problem.tiles = static_cast<int>(ceil_div(count, kTileRows));
    with_type(x.scalar_type(), [&](auto type) {
      using T = decltype(type);
      const int64_t all = int64_t{problem.tiles} * tile_vectors;
      pack_rows<T><<<blocks(all), kThreads, 0, stream>>>(static_cast<const T*>(x.const_data_ptr()) + first * x.stride(0), count,
                                                         static_cast<int>(inputs), x.stride(0), x.stride(1), problem.unit_blocks, all,
                                                         static_cast<float4*>(rows_packed.mutable_data_ptr()));
    });
    const auto warps = static_cast<unsigned>(ceil_div(int64_t{problem.tiles} * problem.slots, kThreads / kWarp));
    const auto run = [&](auto narrow, auto wide, auto deep) {
      if (small) return (n == 2 ? narrow : wide)<<<warps, kThreads, 0, stream>>>(problem);
      deep<<<tail_blocks, kThreads, 0, stream>>>(problem, static_cast<float4*>(buffers.mutable_data_ptr()), static_cast<int>(width));
    };
    consistent ? run(head<2, true>, head<4, true>, tail<true>) : run(head<2, false>, head<4, false>, tail<false>);
    combine<<<blocks(count * (classes + 1)), kThreads, 0, stream>>>(
        problem, count, static_cast<float*>(mean.mutable_data_ptr()) + first * classes,
        static_cast<float*>(entropy.mutable_data_ptr()) + first, static_cast<float*>(variance.mutable_data_ptr()) + first * classes);
  }
  check_launch("mc_dropout_mlp");
  return {mean, entropy, variance};
}

Tensor mask(const Tensor& seed, int64_t rows, int64_t columns, int64_t pass, int64_t stream, double p, bool consistent) {
  check_dropout_mask(seed, rows, columns, pass, stream, p);
  const torch::stable::accelerator::DeviceGuard guard(seed.get_device_index());
  Tensor keep = torch::stable::new_empty(seed, {rows, columns}, ScalarType::Bool);
  if (keep.numel() == 0) return keep;
  dropout_mask<<<blocks(rows * ceil_div(columns, kMcUnits)), kThreads, 0, current_stream(seed)>>>(
      static_cast<const int64_t*>(seed.const_data_ptr()), rows, columns, static_cast<uint32_t>(pass), static_cast<uint32_t>(stream),
      dropout_threshold(p), consistent, static_cast<bool*>(keep.mutable_data_ptr()));
  check_launch("dropout_mask");
  return keep;
}

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda

STABLE_TORCH_LIBRARY_IMPL(uefl_cuda, CUDA, m) {
  m.impl("mc_dropout_mlp", TORCH_BOX(&uefl::cuda::mc_dropout::mc_dropout_mlp));
  m.impl("dropout_mask", TORCH_BOX(&uefl::cuda::mc_dropout::mask));
}
