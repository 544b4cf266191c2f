// Functions shared by all searches of a codebook.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/features.h"
#include "cpu/vq_assign_direct_kernel.h"
#include "cpu/vq_assign_few_kernel.h"

namespace uefl::cpu {

inline const VqAssignFewKernel& few_kernel() {
  return pick<&vq_assign_few_portable, &vq_assign_few_avx2, &vq_assign_few_avx512>();
}

inline const VqAssignDirectKernel& direct_kernel() {
  return pick<&vq_assign_direct_portable, &vq_assign_direct_avx2, &vq_assign_direct_avx512>();
}

constexpr int64_t kLongest = 1 << 16;  // largest d for which rounding in float32 has a bound
constexpr int64_t kStep = 16;          // scores that are compared together

// Returns the smallest of some scores without NaN, or infinity if there is none.
inline float least_of(const float* scores, int64_t count) {
  float least[kStep];
  std::fill(least, least + kStep, std::numeric_limits<float>::infinity());
  const auto lower = [&](int64_t k, int64_t i) {
    least[i] = scores[k + i] < least[i] ? scores[k + i] : least[i];
  };
  int64_t k = 0;
  for (; k + kStep <= count; k += kStep) {
    for (int64_t i = 0; i < kStep; ++i) lower(k, i);
  }
  for (int64_t i = 0; k + i < count; ++i) lower(k, i);
  return *std::min_element(least, least + kStep);
}

// Writes code / |code|, with the norm summed in order. A zero codeword, or one with a norm that underflows,
// stays zero.
inline void to_unit(const double* code, int64_t d, double* unit) {
  double square = 0;
  for (int64_t j = 0; j < d; ++j) square += code[j] * code[j];
  const double norm = std::sqrt(square);
  for (int64_t j = 0; j < d; ++j) unit[j] = norm > 0 ? code[j] / norm : 0;
}

}  // namespace uefl::cpu
