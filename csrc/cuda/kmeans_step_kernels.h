// The inertia of a step of k-means on CUDA, added up as ops/kmeans_step/reference.py does, to the bit; the rest of a step is the search
// and its tail (tail.h). Not run on a GPU yet.
#pragma once

#include <cstdint>

#include "cuda/rows.h"

namespace uefl::cuda {
namespace {

// |x - centre|^2 of each row, times its weight: eight lanes to a row, a partial sum each, combined by halves.
template <class T, class Centre>
__global__ void __launch_bounds__(kThreads)
    row_squares(const T* x, Shape shape, const Centre* centres, const int64_t* labels, const double* weights, double* squares) {
  constexpr int kLanes = 8;
  const int64_t groups = int64_t{gridDim.x} * blockDim.x / kLanes, own = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  for (int64_t first = own / 4 * 4; first < shape.outputs; first += groups) {  // the four groups of a warp go together
    const int64_t row = first + own % 4;
    const bool there = row < shape.outputs;
    double total = 0;
    for (int64_t j = lane; there && j < shape.d; j += kLanes) {
      const double value = static_cast<double>(widen(x[shape.begin(row) + j * shape.stride]));
      const double difference = __dsub_rn(value, static_cast<double>(centres[labels[row] * shape.d + j]));
      total = __dadd_rn(total, __dmul_rn(difference, difference));
    }
    for (int step = kLanes / 2; step > 0; step /= 2) total = __dadd_rn(total, __shfl_xor_sync(kAllLanes, total, step));
    if (there && lane == 0) squares[row] = weights ? __dmul_rn(weights[row], total) : total;
  }
}

// values[i] += values[i + half], where half is a power of two, at least half of n.
__global__ void __launch_bounds__(kThreads) add_halves(double* values, int64_t n, int64_t half) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < half && i + half < n) values[i] = __dadd_rn(values[i], values[i + half]);
}

}  // namespace
}  // namespace uefl::cuda
