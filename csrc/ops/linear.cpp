// What torch sees of linear on the CPU.
#include "cpu/linear.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

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

#if defined(__x86_64__)
// Nothing where the operands are beyond what three bfloat16 hold.
std::optional<Tensor> tile_linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto data = [](const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); };
  const int64_t rows = x.size(0), outputs = weight.size(0);
  Tensor y = torch::stable::new_empty(x, {rows, outputs});
  float* out = static_cast<float*>(y.mutable_data_ptr());
  cpu::Linear product(data(weight), data(bias), x.size(1), outputs);
  std::atomic<bool> holds = true;
  torch::stable::parallel_for(0, product.panels(), 1, [&](int64_t lo, int64_t hi) {
    if (!product.pack(lo, hi)) holds = false;
  });
  if (!holds) return std::nullopt;
  torch::stable::parallel_for(0, rows, 64, [&](int64_t lo, int64_t hi) {
    if (!product.run(data(x), lo, hi, out)) holds = false;
  });
  return holds ? std::optional<Tensor>(y) : std::nullopt;
}
#endif

std::string described(const char* name, const Tensor& tensor) {
  std::string text = std::string(" ") + name + " [";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  for (const auto& [name, tensor] : {std::pair{"x", &x}, std::pair{"weight", &weight}, std::pair{"bias", &bias}}) {
    if (!tensor->is_cpu() || tensor->scalar_type() != ScalarType::Float) {
      throw std::runtime_error(std::string("linear: ") + name + " is not float32 on the CPU; torch.nn.functional.linear takes others");
    }
  }
  if (x.dim() != 2 || weight.dim() != 2 || bias.dim() != 1 || x.size(1) != weight.size(1) || weight.size(0) != bias.size(0)) {
    throw std::runtime_error("linear: expected x [N, D], weight [M, D] and bias [M], got" + described("x", x) +
                             described("weight", weight) + described("bias", bias));
  }
#if defined(__x86_64__)
  if (cpu::linear_pays(x.size(0), x.size(1), weight.size(0))) {
    using torch::stable::contiguous;
    if (const auto y = tile_linear(contiguous(x), contiguous(weight), contiguous(bias))) return *y;
  }
#endif
  return torch_linear(x, weight, bias);
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) { m.impl("linear", TORCH_BOX(&uefl::linear)); }
