// The softmax of a row that four lanes share, and the statistics of its probabilities over the passes of a
// slot.
#pragma once

#include "cuda/mc_dropout_mlp_parts.h"

namespace uefl::cuda {
namespace mc_dropout {
namespace {

// Sums over the four lanes of a row.
__device__ inline float row_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}
__device__ inline float row_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

// The softmax of one row. fmaxf passes over a NaN; the total does not. The hardware computes the exponential
// and the logarithm: the error of exp(x) is a few units of its last place and |x| more, which is below 2^-22
// for every x <= 0; the error of the logarithm below 2^-19.
struct Softmax {
  float most = -INFINITY, total = 0, weighted = 0,
        inverse = 0;  // weighted: sum of exp(below) below; inverse: of the total

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

// Welford's update of a mean and of the sum of squared deviations; share: 1 / passes so far, with this one.
__device__ inline void update(float probability, float share, float& mean, float& moment) {
  const float deviation = probability - mean;
  mean += deviation * share;
  moment += deviation * (probability - mean);
}

}  // namespace
}  // namespace mc_dropout
}  // namespace uefl::cuda
