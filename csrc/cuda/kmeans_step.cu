// kmeans_step on CUDA: the search with a tail that adds each row to its cluster, and inertia where it is asked for. Not run on a GPU yet.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "cuda/kmeans_step_kernels.h"
#include "cuda/stream.h"
#include "cuda/vq_assign.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>(std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1, 1 << 30)); }

template <class T>
void squares_of(const Tensor& x, const Tensor& centres, const Tensor& labels, const double* weights, Tensor& squares, cudaStream_t stream) {
  Shape shape{};
  shape.outputs = shape.inner = x.size(0), shape.segments = shape.books = 1, shape.d = x.size(1);
  shape.inner_stride = x.stride(0), shape.stride = x.stride(1);
  const auto launch = [&](auto centre) {
    row_squares<<<std::min(blocks_of(8 * shape.outputs), 1u << 16), kThreads, 0, stream>>>(
        static_cast<const T*>(x.const_data_ptr()), shape, static_cast<const decltype(centre)*>(centres.const_data_ptr()),
        static_cast<const int64_t*>(labels.const_data_ptr()), weights, static_cast<double*>(squares.mutable_data_ptr()));
  };
  centres.scalar_type() == ScalarType::Double ? launch(double{}) : launch(float{});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> kmeans_step(const Tensor& x, const Tensor& centres_given, std::optional<Tensor> weights_given,
                                                       const Tensor& middle, const Tensor& scale, const Tensor& mass_scale,
                                                       bool with_inertia) {
  const auto require = [](bool condition, const char* expected) { STD_TORCH_CHECK(condition, "kmeans_step: ", expected); };
  const auto is = [&](const Tensor& tensor, int64_t numel) {
    return tensor.is_cuda() && tensor.get_device_index() == x.get_device_index() && tensor.scalar_type() == ScalarType::Double &&
           tensor.numel() == numel && tensor.is_contiguous();
  };
  require(x.dim() == 2 && centres_given.dim() == 2 && x.size(1) == centres_given.size(1), "x must be [N, d] and centres [k, d]");
  const ScalarType type = x.scalar_type();
  require(centres_given.scalar_type() == (type == ScalarType::Double ? ScalarType::Double : ScalarType::Float),
          "centres must be float32, or float64 beside float64");
  require(is(middle, x.size(1)) && is(scale, x.size(1)) && is(mass_scale, 1), "units must be float64, contiguous, on the device of x");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::optional<Tensor> weights;
  if (weights_given) {
    weights = torch::stable::contiguous(*weights_given);
    require(is(*weights, x.size(0)), "weights must be float64 [N], on the device of x");
  }
  const Tensor centres = torch::stable::contiguous(centres_given);
  const double* mass = weights ? static_cast<const double*>(weights->const_data_ptr()) : nullptr;
  Tensor sums = torch::stable::new_zeros(x, centres.sizes(), ScalarType::Long);
  Tensor masses = torch::stable::new_zeros(x, {centres.size(0)}, ScalarType::Long);
  Tensor inertia = torch::stable::new_zeros(x, {}, ScalarType::Double);

  const Tensor indices = assign("kmeans_step", x, centres, "l2", true, [&](const Shape&) {
    Tail tail{};
    tail.counts = static_cast<long long*>(masses.mutable_data_ptr());
    tail.weights = mass;
    tail.mass_scale = static_cast<const double*>(mass_scale.const_data_ptr());
    tail.sums = static_cast<long long*>(sums.mutable_data_ptr());
    tail.scales = static_cast<const double*>(scale.const_data_ptr());
    tail.middle = static_cast<const double*>(middle.const_data_ptr());
    return tail;
  });
  const Tensor labels = torch::stable::reshape(indices, {x.size(0)});
  const int64_t n = x.size(0);
  if (!with_inertia || n == 0) return {labels, sums, masses, inertia};

  const cudaStream_t stream = current_stream(x);
  Tensor squares = torch::stable::new_empty(x, {n}, ScalarType::Double);
  switch (type) {
    case ScalarType::Float:
      squares_of<float>(x, centres, labels, mass, squares, stream);
      break;
    case ScalarType::Double:
      squares_of<double>(x, centres, labels, mass, squares, stream);
      break;
    case ScalarType::Half:
      squares_of<__half>(x, centres, labels, mass, squares, stream);
      break;
    default:  // the search has seen the others off
      squares_of<__nv_bfloat16>(x, centres, labels, mass, squares, stream);
  }
  int64_t half = 1;
  while (2 * half < n) half *= 2;
  for (int64_t left = n; half > 0; left = half, half /= 2) {
    add_halves<<<blocks_of(half), kThreads, 0, stream>>>(static_cast<double*>(squares.mutable_data_ptr()), left, half);
  }
  check_launch("kmeans_step");
  torch::stable::copy_(inertia, torch::stable::reshape(torch::stable::narrow(squares, 0, 0, 1), {}));
  return {labels, sums, masses, inertia};
}

}  // namespace
}  // namespace uefl::cuda

STABLE_TORCH_LIBRARY_IMPL(uefl_cuda, CUDA, m) { m.impl("kmeans_step", TORCH_BOX(&uefl::cuda::kmeans_step)); }
