// A product that is rounded before it is added to anything, on the CPU (compiled with -ffp-contract=off) and
// on a GPU, where nvcc would contract the product and the sum.
#pragma once

#include "common/certificate.h"

namespace uefl {

UEFL_HOST_DEVICE static inline float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
UEFL_HOST_DEVICE static inline double multiply(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

}  // namespace uefl
