// kmeans_step and kmeans_lloyd on CUDA. A step is the search, a pass over x that adds each row to its
// cluster, and a pass for the inertia if it is requested.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>

#include "cuda/kmeans_lloyd_kernels.h"
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

const double* doubles(const Tensor& tensor) { return static_cast<const double*>(tensor.const_data_ptr()); }
long long* numbers(Tensor& tensor) { return static_cast<long long*>(tensor.mutable_data_ptr()); }

// The checked arguments of a step: rows, and the units of their sums.
struct KMeansRows {
  const char* op;
  Tensor x;     // [N, d], from the caller
  Tensor view;  // x in the layout that the kernels read
  Shape shape;
  std::optional<Tensor> weights;  // [N]
  Tensor middle, scale, mass_scale;

  const double* mass() const { return weights ? doubles(*weights) : nullptr; }
  Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) const {
    return torch::stable::new_empty(x, sizes, type);
  }
};

bool is_float64(const Tensor& tensor, int64_t numel, const Tensor& x) {
  return tensor.is_cuda() && tensor.get_device_index() == x.get_device_index() &&
         tensor.scalar_type() == ScalarType::Double && tensor.numel() == numel && tensor.is_contiguous();
}

KMeansRows checked(const char* op, const Tensor& x, const Tensor& centers,
                   const std::optional<Tensor>& weights, const Tensor& middle, const Tensor& scale,
                   const Tensor& mass_scale) {
  const auto require = [op](bool condition, const char* expected) {
    STD_TORCH_CHECK(condition, op, ": ", expected);
  };
  const ScalarType type = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  require(x.dim() == 2 && centers.dim() == 2 && x.size(1) == centers.size(1),
          "x must have shape [N, d], and centers [k, d] with the same d");
  require(centers.scalar_type() == type, "centers must be float64 for float64 x, otherwise float32");
  require(is_float64(middle, x.size(1), x) && is_float64(scale, x.size(1), x) && is_float64(mass_scale, 1, x),
          "middle [d], scale [d] and mass_scale [1] must be contiguous float64 tensors on the device of x");
  KMeansRows rows{op, x, x, {}, {}, middle, scale, mass_scale};
  rows.shape = shape_of(rows.view, {1, centers.size(0), x.size(1), 1});
  if (weights) {
    rows.weights = torch::stable::contiguous(*weights);
    require(is_float64(*rows.weights, x.size(0), x),
            "weights must be float64 of shape [N], on the device of x");
  }
  return rows;
}

// Calls body with x, and with a value of the type of the centers.
template <class Body>
void with_rows(const KMeansRows& rows, const Body& body) {
  with_type(rows.x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    using Center = std::conditional_t<std::is_same_v<T, double>, double, float>;
    body(static_cast<const T*>(rows.view.const_data_ptr()), Center{});
  });
}

// Returns labels [N]. The same launches clear the given memory, for later sums.
Tensor search(const KMeansRows& rows, const Tensor& centers, const Spans& cleared) {
  return torch::stable::reshape(assign(rows.op, rows.x, centers, "l2", true, cleared), {rows.shape.outputs});
}

void sum_rows(const KMeansRows& rows, const Tensor& labels, Tensor& sums, Tensor& masses,
              cudaStream_t stream) {
  with_rows(rows, [&](const auto* x, auto center) {
    RowSums<std::remove_cvref_t<decltype(*x)>, decltype(center)> wanted{};
    wanted.indices = static_cast<const int64_t*>(labels.const_data_ptr()), wanted.weights = rows.mass();
    wanted.counts = numbers(masses), wanted.sums = numbers(sums);
    wanted.scales = doubles(rows.scale), wanted.middle = doubles(rows.middle),
    wanted.mass_scale = doubles(rows.mass_scale);
    launch_row_sums<false>(rows.op, x, rows.shape, wanted, [](int64_t) { return nullptr; }, stream);
  });
}

void sum_squares(const KMeansRows& rows, const Tensor& centers, const Tensor& labels, Tensor& inertia,
                 cudaStream_t stream) {
  const auto blocks = [](int64_t count, int64_t of_block) { return (count + of_block - 1) / of_block; };
  const int64_t grid = std::min<int64_t>(blocks(rows.shape.outputs, kThreads / kSquareLanes), 1 << 16);
  Tensor workspace = rows.empty({rows.shape.outputs}, ScalarType::Double);
  double* squares = static_cast<double*>(workspace.mutable_data_ptr());
  with_rows(rows, [&](const auto* x, auto center) {
    row_squares<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(
        x, rows.shape, static_cast<const decltype(center)*>(centers.const_data_ptr()),
        static_cast<const int64_t*>(labels.const_data_ptr()), rows.mass(), squares);
  });
  int64_t n = rows.shape.outputs, size = 1;
  while (size < n) size *= 2;
  while (true) {
    const int64_t left = std::max<int64_t>(size / kFolded, 1), grid = blocks(left, kFoldThreads);
    fold<<<static_cast<unsigned>(grid), kFoldThreads, 0, stream>>>(
        squares, n, left, static_cast<double*>(inertia.mutable_data_ptr()));
    if (grid == 1) break;
    n = size = left;
  }
  check_launch(rows.op);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> kmeans_step(const Tensor& x, const Tensor& centers_given,
                                                       std::optional<Tensor> weights, const Tensor& middle,
                                                       const Tensor& scale, const Tensor& mass_scale,
                                                       bool with_inertia) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const KMeansRows rows = checked("kmeans_step", x, centers_given, weights, middle, scale, mass_scale);
  const Tensor centers = torch::stable::contiguous(centers_given);
  const cudaStream_t stream = current_stream(x);
  Tensor sums = rows.empty(centers.sizes(), ScalarType::Long);
  Tensor masses = rows.empty({centers.size(0)}, ScalarType::Long);
  Tensor inertia = rows.empty({}, ScalarType::Double);
  const Spans cleared = spans_of({&sums, &masses, &inertia});
  const Tensor labels = search(rows, centers, cleared);
  if (rows.shape.outputs == 0) return {labels, sums, masses, inertia};
  sum_rows(rows, labels, sums, masses, stream);
  if (with_inertia) sum_squares(rows, centers, labels, inertia, stream);
  return {labels, sums, masses, inertia};
}

constexpr int64_t kLookEvery = 16;  // iterations between two checks of the host for the end of the fit

// Returns true if the fit has ended. It waits for the device, so it cannot run while a graph is captured.
bool has_ended(const char* op, const long long* ended, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  long long found = 0;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error == cudaSuccess && capture != cudaStreamCaptureStatusNone) return false;
  if (error == cudaSuccess)
    error = cudaMemcpyAsync(&found, ended, sizeof found, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  STD_TORCH_CHECK(error == cudaSuccess, op, ": CUDA failed: ", cudaGetErrorString(error));
  return found != 0;
}

template <class T, class Center>
void launch_advance(const char* op, const T* x, Shape shape, Lloyd<Center> fit, cudaStream_t stream) {
  const int64_t clusters = kThreads / kSquareLanes, most = kAdvanceBlocks * current_device().multiprocessors;
  const int64_t blocks =
      std::max((shape.outputs + kThreads - 1) / kThreads, (shape.k + clusters - 1) / clusters);
  void* arguments[] = {&x, &shape, &fit};
  const auto kernel = reinterpret_cast<const void*>(advance<T, Center>);
  const cudaError_t error = cudaLaunchCooperativeKernel(kernel, static_cast<unsigned>(std::min(blocks, most)),
                                                        kThreads, arguments, 0, stream);
  STD_TORCH_CHECK(error == cudaSuccess, op, ": the kernel did not launch: ", cudaGetErrorString(error));
}

// Runs iterations. Each is the search and one more launch. The first iteration sums all rows in a separate
// launch.
std::tuple<Tensor, Tensor, Tensor, Tensor> kmeans_lloyd(const Tensor& x, const Tensor& centers_given,
                                                        std::optional<Tensor> weights, const Tensor& middle,
                                                        const Tensor& scale, const Tensor& mass_scale,
                                                        const Tensor& limit, bool spherical,
                                                        int64_t max_iter) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const KMeansRows rows = checked("kmeans_lloyd", x, centers_given, weights, middle, scale, mass_scale);
  STD_TORCH_CHECK(is_float64(limit, 1, x), rows.op, ": limit must be one float64 number on the device of x");
  const int64_t n = rows.shape.outputs, k = rows.shape.k;
  const cudaStream_t stream = current_stream(x);
  Tensor centers = rows.empty(centers_given.sizes(), centers_given.scalar_type());
  torch::stable::copy_(centers, centers_given);
  Tensor sums = rows.empty(centers.sizes(), ScalarType::Long), masses = rows.empty({k}, ScalarType::Long);
  Tensor keys = rows.empty({n}, ScalarType::Long), farthest = rows.empty({k}, ScalarType::Long);
  Tensor shifts = rows.empty({k}, ScalarType::Double), inertia = rows.empty({}, ScalarType::Double);
  Tensor iterations = rows.empty({}, ScalarType::Long), ended = rows.empty({}, ScalarType::Long);
  const Spans cleared = spans_of({&sums, &masses, &inertia, &iterations, &ended});

  Tensor previous, labels = search(rows, centers, cleared);
  if (n == 0) return {centers, labels, inertia, iterations};
  for (int64_t i = 0; i < max_iter; ++i) {
    if (i == 0) sum_rows(rows, labels, sums, masses, stream);
    with_rows(rows, [&](const auto* data, auto center) {
      using Center = decltype(center);
      const auto* before = i == 0 ? nullptr : static_cast<const int64_t*>(previous.const_data_ptr());
      launch_advance(
          rows.op, data, rows.shape,
          Lloyd<Center>{before, static_cast<const int64_t*>(labels.const_data_ptr()), doubles(middle),
                        doubles(scale), rows.mass(), doubles(mass_scale), doubles(limit), spherical,
                        static_cast<Center*>(centers.mutable_data_ptr()), numbers(masses), numbers(sums),
                        numbers(keys), numbers(farthest), static_cast<double*>(shifts.mutable_data_ptr()),
                        numbers(iterations), numbers(ended)},
          stream);
    });
    previous = labels, labels = search(rows, centers, {});
    if (i % kLookEvery == kLookEvery - 1 && has_ended(rows.op, numbers(ended), stream)) break;
  }
  sum_squares(rows, centers, labels, inertia, stream);
  return {centers, labels, inertia, iterations};
}

}  // namespace
}  // namespace uefl::cuda

UEFL_CUDA_OP("kmeans_step", TORCH_BOX(&uefl::cuda::kmeans_step))
UEFL_CUDA_OP("kmeans_lloyd", TORCH_BOX(&uefl::cuda::kmeans_lloyd))
