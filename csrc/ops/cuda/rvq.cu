// rvq on CUDA. A few rows with small codebooks take one launch. Otherwise the stages run one at a time, as in
// Python.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>
#include <vector>

#include "cuda/rvq_kernels.h"
#include "ops/check_search.h"
#include "ops/cuda/device.h"
#include "ops/cuda/register.h"
#include "ops/cuda/stream.h"
#include "ops/cuda/tensors.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using RvqResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Returns true if one launch takes all stages.
bool fits(const Tensor& x, const std::vector<Tensor>& codebooks, const std::string& metric, bool with_sums) {
  if (metric != "l2" || with_sums || codebooks.empty() || codebooks.size() > kMostStages ||
      x.scalar_type() == ScalarType::Double)
    return false;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const SearchSizes first = check_search("rvq", x, codebooks[0], metric);
  const int64_t outputs = x.numel() / first.d;
  if (outputs == 0 || outputs > kRvqBlocks * current_device().multiprocessors || first.d % 4 != 0 ||
      first.d > kMostRvqWidth)
    return false;
  for (const Tensor& codebook : codebooks) {
    const SearchSizes sizes = check_search("rvq", x, codebook, metric);
    if (sizes.d != first.d || sizes.codebooks != first.codebooks || sizes.k * sizes.d > kMostRvqElements ||
        codebook.scalar_type() != ScalarType::Float || !codebook.is_contiguous() ||
        reinterpret_cast<uintptr_t>(codebook.const_data_ptr()) % 16 != 0)
      return false;
  }
  return true;
}

RvqResults by_stages(const Tensor& x, const std::vector<Tensor>& codebooks, const std::string& metric,
                     bool exact, bool with_sums, double codebook_weight, double commitment_weight,
                     bool rotation) {
  const auto stack = run_portable<"rvq">(x, codebooks, metric, exact, with_sums, codebook_weight,
                                         commitment_weight, rotation);
  const auto result = [&](int i) { return torch::stable::detail::to<Tensor>(stack[i]); };
  return {result(0), result(1), result(2), result(3), result(4)};
}

template <class T>
void launch(const T* x, Shape shape, Rvq<T> wanted, cudaStream_t stream) {
  void* arguments[] = {&x, &shape, &wanted};
  const cudaError_t error = cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(rvq_few<T>),
                                                        static_cast<unsigned>(shape.outputs), kThreads,
                                                        arguments, 2 * shape.d * sizeof(float), stream);
  STD_TORCH_CHECK(error == cudaSuccess, "rvq: the kernel did not launch: ", cudaGetErrorString(error));
}

// Runs all stages in one launch, without sums. It does not need `rotation`, which changes only the backward
// pass.
RvqResults in_one_launch(const Tensor& x, const std::vector<Tensor>& codebooks, double weight) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const SearchSizes sizes = check_search("rvq", x, codebooks[0], "l2");
  const int64_t stages = static_cast<int64_t>(codebooks.size());
  int64_t codewords = 0;
  for (const Tensor& codebook : codebooks) codewords += codebook.numel() / sizes.d;
  Tensor rows = x;
  const Shape shape = shape_of(rows, sizes);
  std::vector<int64_t> places(x.sizes().begin(), x.sizes().end());
  places.back() = sizes.segments;
  places.push_back(stages);
  Tensor quantized = torch::stable::new_empty(x, x.sizes()),
         indices = torch::stable::new_empty(x, places, ScalarType::Long),
         losses = torch::stable::new_empty(x, {stages}, ScalarType::Float),
         counts = torch::stable::new_empty(x, {codewords}, ScalarType::Long),
         errors = torch::stable::new_empty(x, {stages, shape.outputs}, ScalarType::Double);
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, double>) {
      Rvq<T> wanted{};
      auto* count = static_cast<long long*>(counts.mutable_data_ptr());
      wanted.stages = static_cast<int>(stages), wanted.counts = count, wanted.codewords = codewords;
      for (const Tensor& codebook : codebooks) {
        wanted.stage[&codebook - codebooks.data()] = {static_cast<const float*>(codebook.const_data_ptr()),
                                                      codebook.size(-2), count};
        count += codebook.numel() / sizes.d;
      }
      wanted.quantized = static_cast<T*>(quantized.mutable_data_ptr());
      wanted.indices = static_cast<int64_t*>(indices.mutable_data_ptr());
      wanted.losses = static_cast<float*>(losses.mutable_data_ptr());
      wanted.errors = static_cast<double*>(errors.mutable_data_ptr());
      wanted.factor = weight / static_cast<double>(x.numel());
      launch(static_cast<const T*>(rows.const_data_ptr()), shape, wanted, current_stream(x));
    }
  });
  return {quantized, indices, losses, counts, torch::stable::new_empty(x, {0, sizes.d}, ScalarType::Double)};
}

RvqResults rvq(const Tensor& x, std::vector<Tensor> codebooks, std::string metric, bool exact, bool with_sums,
               double codebook_weight, double commitment_weight, bool rotation) {
  if (fits(x, codebooks, metric, with_sums))
    return in_one_launch(x, codebooks, codebook_weight + commitment_weight);
  return by_stages(x, codebooks, metric, exact, with_sums, codebook_weight, commitment_weight, rotation);
}

}  // namespace
}  // namespace uefl::cuda

UEFL_CUDA_OP("rvq", TORCH_BOX(&uefl::cuda::rvq))
