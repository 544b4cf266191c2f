// vq_forward on CUDA: a search and its tail (tail.h). Not run on a GPU yet.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/check_search.h"
#include "cuda/vq_assign.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> vq_forward(const Tensor& x, const Tensor& codebook, std::optional<Tensor> scales,
                                                                      std::string metric, bool exact) {
  const SearchSizes sizes = check_search("vq_forward", x, codebook, metric);
  const int64_t codes = sizes.books * sizes.k;
  STD_TORCH_CHECK(!scales || (scales->is_cuda() && scales->get_device_index() == x.get_device_index() &&
                              scales->scalar_type() == ScalarType::Double && scales->numel() == codes && scales->is_contiguous()),
                  "vq_forward: scales must be float64, contiguous, one for each codeword, on the device of x");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const bool wide = codebook.scalar_type() == ScalarType::Double;
  const Tensor rows = torch::stable::contiguous(torch::stable::to(codebook, wide ? ScalarType::Double : ScalarType::Float));
  Tensor quantized = torch::stable::new_empty(x, x.sizes());
  Tensor counts = torch::stable::new_zeros(x, {codes}, ScalarType::Long);
  Tensor largest = torch::stable::new_zeros(x, {scales ? codes : 0}, ScalarType::Long);
  Tensor sums = torch::stable::new_zeros(x, {scales ? codes : 0, sizes.d}, ScalarType::Long);
  Tensor errors = torch::stable::new_zeros(x, {0}, ScalarType::Double);
  const Tensor indices = assign("vq_forward", x, codebook, metric, exact, [&](const Shape& shape) {
    errors = torch::stable::new_zeros(x, {places(shape)}, ScalarType::Double);
    Tail tail{};
    tail.codes = rows.const_data_ptr();
    tail.quantized = quantized.mutable_data_ptr();
    tail.errors = static_cast<double*>(errors.mutable_data_ptr());
    tail.wide = wide;
    tail.counts = static_cast<long long*>(counts.mutable_data_ptr());
    if (scales) {
      tail.sums = static_cast<long long*>(sums.mutable_data_ptr());
      tail.scales = static_cast<const double*>(scales->const_data_ptr());
      tail.largest = static_cast<long long*>(largest.mutable_data_ptr());
    }
    return tail;
  });
  return {quantized, indices, torch::stable::sum(errors), counts, largest, sums};
}

}  // namespace
}  // namespace uefl::cuda

STABLE_TORCH_LIBRARY_IMPL(uefl_cuda, CUDA, m) { m.impl("vq_forward", TORCH_BOX(&uefl::cuda::vq_forward)); }
