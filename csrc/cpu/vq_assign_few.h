// What the two ways to search a codebook share.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/features.h"
#include "cpu/vq_assign_few_kernel.h"

namespace uefl::cpu {

inline const VqAssignFewKernel& few_kernel() {
  return pick<&vq_assign_few_portable, &vq_assign_few_avx2, &vq_assign_few_avx512>();
}

// code / |code| with the norm summed in order; a zero codeword (or one whose norm underflows) stays zero.
inline void to_unit(const double* code, int64_t d, double* unit) {
  double square = 0;
  for (int64_t j = 0; j < d; ++j) square += code[j] * code[j];
  const double norm = std::sqrt(square);
  for (int64_t j = 0; j < d; ++j) unit[j] = norm > 0 ? code[j] / norm : 0;
}

}  // namespace uefl::cpu
