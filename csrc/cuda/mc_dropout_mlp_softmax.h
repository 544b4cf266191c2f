// The softmax of a row that four lanes share, and the statistics of its probabilities over the passes of a
// slot.
#pragma once

#include "cuda/mc_dropout_mlp_parts.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

// Return the sum, or the largest value, of the four lanes of a row.
__device__ inline float row_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}
__device__ inline float row_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

// The softmax of one row. fmaxf() ignores a NaN, but the total does not. The hardware computes the
// exponential and the logarithm. The error of exp(x) is a few units of its last place plus |x| units, which
// is below 2^-22 for every x <= 0. The error of the logarithm is below 2^-19.
struct Softmax {
  float most = -INFINITY, total = 0, weighted = 0,
        inverse = 0;  // weighted: sum of exp(below) below; inverse: 1 / total

  __device__ float power(float logit) const { return __expf(logit - most); }
  __device__ float add(float logit) {
    const float e = power(logit);
    total += e;
    weighted += e > 0 ? e * (logit - most) : 0.0f;
    return e;
  }
  __device__ void sum_up() {
    total = row_sum(total), weighted = row_sum(weighted);
    inverse = __fdividef(1, total);
  }
  __device__ float nats() const { return __logf(total) - weighted * inverse; }
};

// Updates a mean and the sum of squared deviations by Welford's formula. share is 1 / passes so far,
// including this one.
__device__ inline void update(float probability, float share, float& mean, float& moment) {
  const float deviation = probability - mean;
  mean += deviation * share;
  moment += deviation * (probability - mean);
}

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda
