// Checks a direct call of torch.ops before a kernel of the transition and set-proportion ops reads its
// pointers, on the CPU and on a GPU. The public functions check more (uefl_kernels/_checks.py).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace uefl {

class CheckInputs {
 public:
  CheckInputs(const char* op, const torch::stable::Tensor& logits) : op_(op), logits_(logits) {
    using torch::headeronly::ScalarType;
    const ScalarType type = logits.scalar_type();
    require(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half ||
                type == ScalarType::Double,
            "expected logits of float32, bfloat16, float16 or float64");
    require(logits.dim() == 2 && logits.size(1) > 0, "logits must have shape [B, K]");
  }

  void require(bool condition, const char* expected) const {
    if (!condition) throw std::runtime_error(std::string(op_) + ": " + expected);
  }

  void index(const torch::stable::Tensor& tensor, int64_t length) const {
    same_device(tensor);
    require(tensor.scalar_type() == torch::headeronly::ScalarType::Long, "expected indices of int64");
    shape(tensor, {length});
  }

  void values(const torch::stable::Tensor& tensor, std::initializer_list<int64_t> sizes) const {
    using torch::headeronly::ScalarType;
    same_device(tensor);
    require(tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::Double,
            "expected constants of float32 or float64");
    shape(tensor, sizes);
  }

 private:
  void same_device(const torch::stable::Tensor& tensor) const {
    require(tensor.is_cpu() == logits_.is_cpu() && tensor.is_cuda() == logits_.is_cuda() &&
                tensor.get_device_index() == logits_.get_device_index(),
            "all tensors must be on the same device");
  }

  void shape(const torch::stable::Tensor& tensor, std::initializer_list<int64_t> sizes) const {
    bool same = tensor.dim() == static_cast<int64_t>(sizes.size());
    for (int64_t i = 0; same && i < tensor.dim(); ++i) same = tensor.size(i) == sizes.begin()[i];
    require(same, "shapes do not fit together");
  }

  const char* const op_;
  const torch::stable::Tensor& logits_;
};

}  // namespace uefl
