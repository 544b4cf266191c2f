// kmeans_step on CUDA: the search, then a pass over x that adds each row to its cluster, and one for the
// inertia on request.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>

#include "cuda/kmeans_step_kernels.h"
#include "ops/cuda/register.h"
#include "ops/cuda/row_sums_launch.h"
#include "ops/cuda/search_launch.h"
#include "ops/cuda/stream.h"
#include "ops/cuda/tensors.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// squares [N] is workspace.
template <class T, class Center>
void launch_inertia(const T* x, const Shape& shape, const Center* centers, const int64_t* labels,
                    const double* weights, double* squares, double* inertia, cudaStream_t stream) {
  const auto blocks = [](int64_t count, int64_t of_block) { return (count + of_block - 1) / of_block; };
  const int64_t grid = std::min<int64_t>(blocks(shape.outputs, kThreads / kSquareLanes), 1 << 16);
  row_squares<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(x, shape, centers, labels, weights,
                                                                    squares);
  int64_t n = shape.outputs, size = 1;
  while (size < n) size *= 2;
  while (true) {
    const int64_t left = std::max<int64_t>(size / kFolded, 1), grid = blocks(left, kFoldThreads);
    fold<<<static_cast<unsigned>(grid), kFoldThreads, 0, stream>>>(squares, n, left, inertia);
    if (grid == 1) break;
    n = size = left;
  }
  check_launch("kmeans_step");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> kmeans_step(const Tensor& x, const Tensor& centers_given,
                                                       std::optional<Tensor> weights_given,
                                                       const Tensor& middle, const Tensor& scale,
                                                       const Tensor& mass_scale, bool with_inertia) {
  const auto require = [](bool condition, const char* expected) {
    STD_TORCH_CHECK(condition, "kmeans_step: ", expected);
  };
  const auto is = [&](const Tensor& tensor, int64_t numel) {
    return tensor.is_cuda() && tensor.get_device_index() == x.get_device_index() &&
           tensor.scalar_type() == ScalarType::Double && tensor.numel() == numel && tensor.is_contiguous();
  };
  require(x.dim() == 2 && centers_given.dim() == 2 && x.size(1) == centers_given.size(1),
          "x must be [N, d] and centers [k, d]");
  const ScalarType type = x.scalar_type();
  require(
      centers_given.scalar_type() == (type == ScalarType::Double ? ScalarType::Double : ScalarType::Float),
      "centers must be float32, or float64 beside float64");
  require(is(middle, x.size(1)) && is(scale, x.size(1)) && is(mass_scale, 1),
          "units must be float64, contiguous, on the device of x");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::optional<Tensor> weights;
  if (weights_given) {
    weights = torch::stable::contiguous(*weights_given);
    require(is(*weights, x.size(0)), "weights must be float64 [N], on the device of x");
  }
  const Tensor centers = torch::stable::contiguous(centers_given);
  const cudaStream_t stream = current_stream(x);
  Tensor sums = torch::stable::new_empty(x, centers.sizes(), ScalarType::Long);
  Tensor masses = torch::stable::new_empty(x, {centers.size(0)}, ScalarType::Long);
  Tensor inertia = torch::stable::new_empty(x, {}, ScalarType::Double);
  const Spans cleared = spans_of({&sums, &masses, &inertia});
  const Tensor labels =
      torch::stable::reshape(assign("kmeans_step", x, centers, "l2", true, cleared).first, {x.size(0)});
  Tensor rows = x;
  const Shape shape = shape_of(rows, {1, centers.size(0), x.size(1), 1});
  if (shape.outputs == 0) return {labels, sums, masses, inertia};

  const auto doubles = [](const Tensor& tensor) {
    return static_cast<const double*>(tensor.const_data_ptr());
  };
  const int64_t* chosen = static_cast<const int64_t*>(labels.const_data_ptr());
  const double* mass = weights ? doubles(*weights) : nullptr;
  with_type(type, [&](auto element) {
    using T = decltype(element);
    using Center = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const T* data = static_cast<const T*>(rows.const_data_ptr());
    RowSums<T, Center> wanted{};
    wanted.indices = chosen, wanted.weights = mass;
    wanted.counts = static_cast<long long*>(masses.mutable_data_ptr()),
    wanted.sums = static_cast<long long*>(sums.mutable_data_ptr());
    wanted.scales = doubles(scale), wanted.middle = doubles(middle), wanted.mass_scale = doubles(mass_scale);
    launch_row_sums<false>("kmeans_step", data, shape, wanted, [](int64_t) { return nullptr; }, stream);
    if (!with_inertia) return;
    Tensor squares = torch::stable::new_empty(x, {shape.outputs}, ScalarType::Double);
    launch_inertia(data, shape, static_cast<const Center*>(centers.const_data_ptr()), chosen, mass,
                   static_cast<double*>(squares.mutable_data_ptr()),
                   static_cast<double*>(inertia.mutable_data_ptr()), stream);
  });
  return {labels, sums, masses, inertia};
}

}  // namespace
}  // namespace uefl::cuda

UEFL_CUDA_OP("kmeans_step", TORCH_BOX(&uefl::cuda::kmeans_step))
