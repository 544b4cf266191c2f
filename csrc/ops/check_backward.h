// Checks a direct call of vq_backward on the CPU and on a GPU, in addition to the checks of check_search.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <stdexcept>

#include "ops/check_search.h"

namespace uefl {

inline void check_backward(const torch::stable::Tensor& x, const torch::stable::Tensor& indices,
                           const torch::stable::Tensor* grad_quantized, const torch::stable::Tensor& pull,
                           const SearchSizes& sizes) {
  using torch::headeronly::ScalarType;
  const auto require = [](bool condition, const char* expected) {
    if (!condition) throw std::runtime_error(std::string("vq_backward: ") + expected);
  };
  const auto on_device_of_x = [&](const torch::stable::Tensor& tensor) {
    return tensor.is_cpu() == x.is_cpu() && tensor.is_cuda() == x.is_cuda() &&
           tensor.get_device_index() == x.get_device_index();
  };
  const auto shaped_like_x = [&](const torch::stable::Tensor& tensor, int64_t last) {
    bool same = tensor.dim() == x.dim() && tensor.size(-1) == last;
    for (int64_t i = 0; same && i + 1 < x.dim(); ++i) same = tensor.size(i) == x.size(i);
    return same;
  };
  require(
      on_device_of_x(indices) && on_device_of_x(pull) && (!grad_quantized || on_device_of_x(*grad_quantized)),
      "x, indices, grad_quantized and pull must be on the same device");
  require(indices.scalar_type() == ScalarType::Long && shaped_like_x(indices, sizes.segments),
          "indices must be int64 of shape [..., S] for x [..., D]");
  require(!grad_quantized || (grad_quantized->scalar_type() == x.scalar_type() &&
                              shaped_like_x(*grad_quantized, x.size(-1))),
          "grad_quantized must have the shape and the dtype of x");
  require((pull.scalar_type() == ScalarType::Float || pull.scalar_type() == ScalarType::Double) &&
              pull.numel() == 1,
          "pull must be a float32 or float64 scalar");
}

}  // namespace uefl
