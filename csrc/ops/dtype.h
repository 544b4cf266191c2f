// A tensor's element type in the terms of the kernels.
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
    default:  // the checks of the op have seen the others off
      return cpu::Dtype::f64;
  }
}

}  // namespace uefl
