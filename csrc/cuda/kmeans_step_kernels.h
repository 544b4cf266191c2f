// The inertia of a step of k-means on CUDA, added up as ops/kmeans_step/reference.py does, to the bit; the
// rest of a step is the search and row_sums.h.
#pragma once

#include <cstdint>

#include "cuda/rows.h"

namespace uefl::cuda {
namespace {

constexpr int kSquareLanes = 8;

// |x - center|^2 of each row, times its weight: eight lanes to a row, a partial sum each, combined by halves.
template <class T, class Center>
__global__ void __launch_bounds__(kThreads)
    row_squares(const T* x, Shape shape, const Center* centers, const int64_t* labels, const double* weights,
                double* squares) {
  const int64_t groups = int64_t{gridDim.x} * blockDim.x / kSquareLanes,
                own = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kSquareLanes;
  const int lane = threadIdx.x % kSquareLanes;
  for (int64_t first = own / 4 * 4; first < shape.outputs;
       first += groups) {  // the four groups of a warp go together
    const int64_t row = first + own % 4;
    const bool there = row < shape.outputs;
    double total = 0;
    if (there) {
      const T* value = x + row * shape.inner_stride;
      const Center* center = centers + labels[row] * shape.d;
      UEFL_UNROLL
      for (int64_t j = lane; j < shape.d; j += kSquareLanes) {
        const double difference =
            __dsub_rn(static_cast<double>(widen(value[j * shape.stride])), static_cast<double>(center[j]));
        total = __dadd_rn(total, __dmul_rn(difference, difference));
      }
    }
    for (int step = kSquareLanes / 2; step > 0; step /= 2)
      total = __dadd_rn(total, __shfl_xor_sync(kAllLanes, total, step));
    if (there && lane == 0) squares[row] = weights ? __dmul_rn(weights[row], total) : total;
  }
}

constexpr int kFoldThreads = 1024, kFolded = 32;  // values of a thread

// Sum by halves of kCount values that are `apart` from each other: of those in even places and of those in
// odd ones. Zero from n on.
template <int kCount>
__device__ double tree(const double* values, int64_t n, int64_t at, int64_t apart) {
  if constexpr (kCount == 1) {
    return at < n ? values[at] : 0;
  } else {
    return __dadd_rn(tree<kCount / 2>(values, n, at, 2 * apart),
                     tree<kCount / 2>(values, n, at + apart, 2 * apart));
  }
}

// The first five halvings of 32 * left values, n of them not zero, into the first `left`; by a single block
// all of them, into total.
__global__ void __launch_bounds__(kFoldThreads) fold(double* values, int64_t n, int64_t left, double* total) {
  __shared__ double part[kFoldThreads];
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const double own = i < left ? tree<kFolded>(values, n, i, left) : 0;
  if (gridDim.x > 1) {
    if (i < left) values[i] = own;
    return;
  }
  part[i] = own;
  for (int64_t half = left / 2; half > 0; half /= 2) {
    __syncthreads();
    if (i < half) part[i] = __dadd_rn(part[i], part[i + half]);
  }
  if (i == 0) *total = part[0];
}

}  // namespace
}  // namespace uefl::cuda
