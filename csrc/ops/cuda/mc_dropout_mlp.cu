// Registers mc_dropout_mlp and dropout_mask on CUDA (mc_dropout_mlp_plan.h).
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cuda/mc_dropout_mlp_plan.h"
#include "ops/check_mc_dropout.h"
#include "ops/cuda/register.h"
#include "ops/cuda/stream.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Returns the number of blocks for this number of threads, within the limit of a grid. A thread may process
// several items.
unsigned blocks(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(threads, kThreads), 1, 1 << 20));
}

Tensor vectors(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {4 * count}, ScalarType::Float);
}

struct StreamLauncher {
  cudaStream_t stream;

  template <class Kernel, class... Arguments>
  void over(int64_t threads, Kernel kernel, const Arguments&... arguments) const {
    kernel<<<blocks(threads), kThreads, 0, stream>>>(arguments...);
  }
  // Launches a kernel that does not loop. A slab has far fewer warps than the limit of a grid.
  template <class Kernel, class... Arguments>
  void all(int64_t threads, Kernel kernel, const Arguments&... arguments) const {
    over(threads, kernel, arguments...);
  }
};

template <class Body>
void with_type(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Half:
      return body(__half{});
    default:  // the checks have rejected other dtypes
      return body(__nv_bfloat16{});
  }
}

std::tuple<Tensor, Tensor, Tensor> mc_dropout_mlp(const Tensor& x, const Tensor& parameters_given,
                                                  std::vector<int64_t> widths, std::vector<double> p,
                                                  int64_t passes, std::string activation, bool consistent,
                                                  const Tensor& seed) {
  check_mc_dropout(x, parameters_given, widths, p, passes, activation, seed);
  const int64_t depth = static_cast<int64_t>(widths.size()) - 1, rows = x.size(0), classes = widths.back();
  STD_TORCH_CHECK(depth <= kMostLayers, "mc_dropout_mlp: the CUDA kernel takes at most ", kMostLayers,
                  " layers after the first dropout, got ", depth, "; use backend 'reference'");
  STD_TORCH_CHECK(passes <= INT32_MAX, "mc_dropout_mlp: the CUDA kernel takes at most 2^31 - 1 passes, got ",
                  passes);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor parameters = torch::stable::contiguous(parameters_given);
  Tensor mean = torch::stable::new_empty(x, {rows, classes}, ScalarType::Float);
  Tensor entropy = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  Tensor variance = torch::stable::new_empty(x, {rows, classes}, ScalarType::Float);
  if (rows == 0) return {mean, entropy, variance};

  Call call{.widths = widths,
            .thresholds = {},
            .rows = rows,
            .passes = passes,
            .activation = activation_of(activation),
            .consistent = consistent};
  for (const double rate : p) call.thresholds.push_back(dropout_threshold(rate));
  const Plan plan(call);
  Tensor weights = vectors(x, plan.weight_vectors), packed = vectors(x, plan.row_vectors),
         buffers = vectors(x, plan.buffer_vectors);
  Tensor moments = torch::stable::new_empty(x, {plan.moments}, ScalarType::Float);
  const auto data = [](auto*& target, Tensor& tensor) {
    target = static_cast<std::remove_reference_t<decltype(target)>>(tensor.mutable_data_ptr());
  };
  Arrays arrays{};
  arrays.parameters = static_cast<const float*>(parameters.const_data_ptr());
  arrays.seed = static_cast<const int64_t*>(seed.const_data_ptr());
  data(arrays.weights, weights), data(arrays.rows, packed), data(arrays.buffers, buffers),
      data(arrays.moments, moments);
  data(arrays.mean, mean), data(arrays.entropy, entropy), data(arrays.variance, variance);
  with_type(x.scalar_type(), [&](auto type) {
    run(plan, arrays, static_cast<const decltype(type)*>(x.const_data_ptr()), x.stride(0), x.stride(1),
        StreamLauncher{current_stream(x)});
  });
  check_launch("mc_dropout_mlp");
  return {mean, entropy, variance};
}

Tensor mask(const Tensor& seed, int64_t rows, int64_t columns, int64_t pass, int64_t stream, double p,
            bool consistent) {
  check_dropout_mask(seed, rows, columns, pass, stream, p);
  const torch::stable::accelerator::DeviceGuard guard(seed.get_device_index());
  Tensor keep = torch::stable::new_empty(seed, {rows, columns}, ScalarType::Bool);
  if (keep.numel() == 0) return keep;
  dropout_mask<<<blocks(rows * ceil_div(columns, kMcUnits)), kThreads, 0, current_stream(seed)>>>(
      static_cast<const int64_t*>(seed.const_data_ptr()), rows, columns, static_cast<uint32_t>(pass),
      static_cast<uint32_t>(stream), dropout_threshold(p), consistent,
      static_cast<bool*>(keep.mutable_data_ptr()));
  check_launch("dropout_mask");
  return keep;
}

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda

UEFL_CUDA_OP("mc_dropout_mlp", TORCH_BOX(&uefl::cuda::mc_dropout::mc_dropout_mlp))
UEFL_CUDA_OP("dropout_mask", TORCH_BOX(&uefl::cuda::mc_dropout::mask))
