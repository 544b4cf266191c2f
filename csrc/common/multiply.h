// A product that is rounded before it is added to anything, on the CPU (compiled with -ffp-contract=off) and
// on a GPU, where nvcc would contract the product and the sum.
#pragma once

#include <type_traits>

#include "common/certificate.h"

namespace uefl {

// T is float or double.
template <class T>
UEFL_HOST_DEVICE static inline T multiply(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>) return __fmul_rn(a, b);
  if constexpr (std::is_same_v<T, double>) return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

}  // namespace uefl
