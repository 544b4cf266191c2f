// Converts the element type of a tensor to the name that the kernels use.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "cpu/vq_assign.h"

namespace uefl {

inline cpu::Dtype dtype_of(const torch::stable::Tensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return cpu::Dtype::f32;
    case ScalarType::BFloat16:
      return cpu::Dtype::bf16;
    case ScalarType::Half:
      return cpu::Dtype::f16;
    default:  // the checks of the op have refused other dtypes
      return cpu::Dtype::f64;
  }
}

}  // namespace uefl
