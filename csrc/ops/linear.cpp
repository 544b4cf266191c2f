// Registers linear for the CPU.
#include "cpu/linear.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string described(const char* name, const Tensor& tensor) {
  std::string text = std::string(" ") + name + " [";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  for (const auto& [name, tensor] :
       {std::pair{"x", &x}, std::pair{"weight", &weight}, std::pair{"bias", &bias}}) {
    if (!tensor->is_cpu() || tensor->scalar_type() != ScalarType::Float) {
      throw std::runtime_error(
          std::string("linear: ") + name +
          " must be float32 on the CPU; use torch.nn.functional.linear for other tensors");
    }
  }
  if (x.dim() != 2 || weight.dim() != 2 || bias.dim() != 1 || x.size(1) != weight.size(1) ||
      weight.size(0) != bias.size(0)) {
    throw std::runtime_error("linear: expected x [N, D], weight [M, D] and bias [M], got" +
                             described("x", x) + described("weight", weight) + described("bias", bias));
  }
  const Tensor rows = torch::stable::contiguous(x), units = torch::stable::contiguous(weight),
               base = torch::stable::contiguous(bias);
  const auto data = [](const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); };
  Tensor y = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  cpu::linear({data(rows), data(units), data(base), static_cast<float*>(y.mutable_data_ptr()), x.size(0),
               x.size(1), weight.size(0)},
              [](int64_t count, const std::function<void(int64_t, int64_t)>& work) {
                torch::stable::parallel_for(0, count, 1, work);
              });
  return y;
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) { m.impl("linear", TORCH_BOX(&uefl::linear)); }
