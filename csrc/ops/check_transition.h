// Checks a direct call of torch.ops before a kernel of the transition and set-proportion ops reads its
// pointers, on the CPU and on a GPU. The public functions check more (uefl_kernels/_checks.py).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
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
            "logits must be float32, bfloat16, float16 or float64");
    require(logits.dim() == 2 && logits.size(1) > 0, "logits must have shape [B, K]");
  }

  void require(bool condition, const std::string& expected) const {
    if (!condition) throw std::runtime_error(std::string(op_) + ": " + expected);
  }

  void index(const std::string& name, const torch::stable::Tensor& tensor, int64_t length) const {
    same_device(name, tensor);
    require(tensor.scalar_type() == torch::headeronly::ScalarType::Long, name + " must be int64");
    shape(name, tensor, {length});
  }

  void values(const std::string& name, const torch::stable::Tensor& tensor,
              std::initializer_list<int64_t> sizes) const {
    using torch::headeronly::ScalarType;
    same_device(name, tensor);
    require(tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::Double,
            name + " must be float32 or float64");
    shape(name, tensor, sizes);
  }

 private:
  void same_device(const std::string& name, const torch::stable::Tensor& tensor) const {
    require(tensor.is_cpu() == logits_.is_cpu() && tensor.is_cuda() == logits_.is_cuda() &&
                tensor.get_device_index() == logits_.get_device_index(),
            name + " must be on the device of logits");
  }

  void shape(const std::string& name, const torch::stable::Tensor& tensor,
             std::initializer_list<int64_t> sizes) const {
    if (std::equal(sizes.begin(), sizes.end(), tensor.sizes().begin(), tensor.sizes().end())) return;
    std::string expected;
    for (const int64_t size : sizes) expected += (expected.empty() ? "" : ", ") + std::to_string(size);
    require(false, name + " must have shape [" + expected + "]");
  }

  const char* const op_;
  const torch::stable::Tensor& logits_;
};

}  // namespace uefl
