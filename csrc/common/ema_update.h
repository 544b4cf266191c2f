// Moving averages of the codewords of a VQ layer (van den Oord et al. 2017, appendix A.1), after a batch:
//
//   size    <- size + step (count - size)
//   average <- average + step (sum - average)
//   codeword <- average / smoothed,  smoothed = (size + eps) / (total + K eps) * total
//
// total is the sum of the K sizes. If the sum of a codeword has NaN, its count and its sum are zero instead.
// If the smoothed size of a codeword is zero, the codeword stays. The CPU and CUDA round each operation, and
// add in the same order, so they give the same bits.
//
// Bytes that must move: each array once. Operations: less than one for each byte.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/multiply.h"

namespace uefl {

constexpr int kTotalParts = 256;  // part i of a total adds sizes i, i + 256, ...; a tree adds the parts
constexpr int kNormParts = 32;    // as above, for the squares of a codeword

template <class T>
struct EmaUpdate {
  int64_t codebooks, k, d;
  const T *sizes, *averages, *codewords;  // [codebooks, k], [codebooks, k, d]
  const int64_t* counts;                  // [codebooks, k], of the batch
  const double* sums;                     // [codebooks, k, d], of the batch
  const T* weights;                       // [codebooks, k]: factors of step, or null
  T step, eps, all_eps;                   // all_eps: k eps
  bool unit;                              // scale codewords to length 1
  T *new_sizes, *new_averages, *new_codewords;
};

// Moves an average towards the value of a batch. With a step of 1 the result is exactly `to`.
template <class T>
struct AverageStep {
  T factor;
  bool from_start;

  UEFL_HOST_DEVICE explicit AverageStep(T step)
      : factor(fabs(step) < T(0.5) ? step : step - T(1)), from_start(fabs(step) < T(0.5)) {}
  UEFL_HOST_DEVICE T operator()(T from, T to) const {
    return (from_start ? from : to) + multiply(factor, to - from);
  }
};

template <class T>
UEFL_HOST_DEVICE static inline AverageStep<T> step_of(const EmaUpdate<T>& run, int64_t codeword) {
  return AverageStep<T>(run.weights ? multiply(run.step, run.weights[codeword]) : run.step);
}

// Returns the size with Laplace smoothing. The average is divided by it.
template <class T>
UEFL_HOST_DEVICE static inline T smoothed(const EmaUpdate<T>& run, int64_t codeword, T total) {
  return multiply((run.new_sizes[codeword] + run.eps) / (total + run.all_eps), total);
}

// Returns the length of a codeword, at least 1e-6, from the sum of its squares.
template <class T>
UEFL_HOST_DEVICE static inline T length(double squares) {
  const T norm = static_cast<T>(sqrt(squares)), least = T(1e-6);
  return norm > least ? norm : least;
}

}  // namespace uefl
