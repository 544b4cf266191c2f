// What torch sees of linear on the CPU.
#include "cpu/linear.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <stdexcept>

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor torch_linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(std::optional<Tensor>(bias))};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor linear(const Tensor& x_given, const Tensor& weight_given, const Tensor& bias_given) {
  for (const Tensor* tensor : {&x_given, &weight_given, &bias_given}) {
    if (!tensor->is_cpu() || tensor->scalar_type() != ScalarType::Float) {
      throw std::runtime_error("linear: x, weight and bias must be float32 on the CPU");
    }
  }
  if (x_given.dim() != 2 || weight_given.dim() != 2 || bias_given.dim() != 1 || x_given.size(1) != weight_given.size(1) ||
      weight_given.size(0) != bias_given.size(0)) {
    throw std::runtime_error("linear: x must have shape [N, D], weight [M, D] and bias [M]");
  }
  const int64_t rows = x_given.size(0), inputs = x_given.size(1), outputs = weight_given.size(0);
  if (!cpu::linear_pays(rows, inputs, outputs)) return torch_linear(x_given, weight_given, bias_given);
#if defined(__x86_64__)
  const Tensor x = torch::stable::contiguous(x_given), weight = torch::stable::contiguous(weight_given),
               bias = torch::stable::contiguous(bias_given);
  Tensor y = torch::stable::new_empty(x, {rows, outputs});
  const auto data = [](const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); };
  cpu::Linear product(data(weight), data(bias), inputs, outputs);
  float* out = static_cast<float*>(y.mutable_data_ptr());
  torch::stable::parallel_for(0, product.panels(), 1, [&](int64_t lo, int64_t hi) { product.pack(lo, hi); });
  torch::stable::parallel_for(0, rows, 64, [&](int64_t lo, int64_t hi) { product.run(data(x), lo, hi, out); });
  return y;
#endif
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) { m.impl("linear", TORCH_BOX(&uefl::linear)); }
