// Registers mc_dropout_mlp and dropout_mask on CUDA (mc_dropout_mlp_plan.h). Deeper and wider heads run in
// Triton.
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

// Returns the number of thread blocks for this number of threads, within the limit of a grid. A thread may
// process several items.
unsigned blocks(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(threads, kThreads), 1, 1 << 20));
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

using Results = std::tuple<Tensor, Tensor, Tensor>;

// Runs one layer with at most kWide outputs.
Results run_head(const Tensor& x, const Tensor& parameters_given, const McCall& call, const Tensor& seed) {
  const int64_t rows = call.rows, classes = call.classes;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor parameters = torch::stable::contiguous(parameters_given);
  const auto empty = [&](torch::headeronly::IntHeaderOnlyArrayRef sizes) {
    return torch::stable::new_empty(x, sizes, ScalarType::Float);
  };
  Tensor mean = empty({rows, classes}), entropy = empty({rows}), variance = empty({rows, classes});
  if (rows == 0) return {mean, entropy, variance};
  const Plan plan(call);
  Tensor weights = empty({4 * plan.weight_vectors}), packed = empty({4 * plan.row_vectors}),
         moments = empty({plan.moments});
  const auto data = [](auto*& target, Tensor& tensor) {
    target = static_cast<std::remove_reference_t<decltype(target)>>(tensor.mutable_data_ptr());
  };
  McArrays arrays{};
  arrays.parameters = static_cast<const float*>(parameters.const_data_ptr());
  arrays.seed = static_cast<const int64_t*>(seed.const_data_ptr());
  data(arrays.weights, weights), data(arrays.rows, packed), data(arrays.moments, moments);
  data(arrays.mean, mean), data(arrays.entropy, entropy), data(arrays.variance, variance);
  with_type(x.scalar_type(), [&](auto type) {
    run(plan, arrays, static_cast<const decltype(type)*>(x.const_data_ptr()), x.stride(0), x.stride(1),
        StreamLauncher{current_stream(x)});
  });
  check_launch("mc_dropout_mlp");
  return {mean, entropy, variance};
}

Results mc_dropout_mlp(const Tensor& x, const Tensor& parameters, std::vector<int64_t> widths,
                       std::vector<double> p, int64_t passes, std::string activation, bool consistent,
                       const Tensor& seed) {
  check_mc_dropout(x, parameters, widths, p, passes, activation, seed);
  STD_TORCH_CHECK(passes <= INT32_MAX, "mc_dropout_mlp: a GPU takes at most 2^31 - 1 passes, got ", passes);
  if (widths.size() == 2 && widths[1] <= kWide) {
    return run_head(x, parameters,
                    {widths[0], widths[1], dropout_threshold(p[0]), dropout_threshold(p[1]), x.size(0),
                     passes, consistent},
                    seed);
  }
  const auto found =
      run_portable<"mc_dropout_mlp">(x, parameters, widths, p, passes, activation, consistent, seed);
  return {torch::stable::detail::to<Tensor>(found[0]), torch::stable::detail::to<Tensor>(found[1]),
          torch::stable::detail::to<Tensor>(found[2])};
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
