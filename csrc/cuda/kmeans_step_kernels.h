// The inertia of a step of k-means on CUDA, added up as in ops/kmeans_step/reference.py, bit for bit. The
// rest of a step is the search and row_sums.h.
#pragma once

#include <cstdint>

#include "cuda/rows.h"

namespace uefl::cuda {
namespace {

constexpr int kSquareLanes = 8;

// Returns the sum of the squares of d values to eight lanes. Each lane has a partial sum, and the sums are
// combined by halves. All lanes of a warp call it.
template <class Value>
__device__ double square_norm(int64_t d, const Value& value) {
  double total = 0;
  UEFL_UNROLL
  for (int64_t j = threadIdx.x % kSquareLanes; j < d; j += kSquareLanes) {
    const double own = value(j);
    total = __dadd_rn(total, __dmul_rn(own, own));
  }
  for (int step = kSquareLanes / 2; step > 0; step /= 2)
    total = __dadd_rn(total, __shfl_xor_sync(kAllLanes, total, step));
  return total;
}

// Calls work(item, there) for groups of eight lanes that share the items. All four groups of a warp run the
// same number of steps; a group may have no item.
template <class Body>
__device__ void for_each_group(int64_t items, const Body& work) {
  const int64_t groups = int64_t{gridDim.x} * blockDim.x / kSquareLanes,
                own = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kSquareLanes;
  for (int64_t first = own / 4 * 4; first < items; first += groups)
    work(first + own % 4, first + own % 4 < items);
}

// Computes |x - center|^2 of each row, times its weight.
template <class T, class Center>
__global__ void __launch_bounds__(kThreads)
    row_squares(const T* x, Shape shape, const Center* centers, const int64_t* labels, const double* weights,
                double* squares) {
  for_each_group(shape.outputs, [&](int64_t row, bool there) {
    const T* value = x + row * shape.inner_stride;
    const Center* center = there ? centers + labels[row] * shape.d : nullptr;
    const double total = square_norm(there ? shape.d : 0, [&](int64_t j) {
      return __dsub_rn(static_cast<double>(widen(value[j * shape.stride])), static_cast<double>(center[j]));
    });
    if (there && threadIdx.x % kSquareLanes == 0)
      squares[row] = weights ? __dmul_rn(weights[row], total) : total;
  });
}

constexpr int kFoldThreads = 1024, kFolded = 32;  // values of a thread

// Sums kCount values by halves: the values in even places and the values in odd places. They are `apart` from
// each other, and zero from n on.
template <int kCount>
__device__ double tree(const double* values, int64_t n, int64_t at, int64_t apart) {
  if constexpr (kCount == 1) {
    return at < n ? values[at] : 0;
  } else {
    return __dadd_rn(tree<kCount / 2>(values, n, at, 2 * apart),
                     tree<kCount / 2>(values, n, at + apart, 2 * apart));
  }
}

// Runs the first five halvings of 32 * left values, of which the first n may be nonzero, and writes the first
// `left` values. A single thread block runs all halvings and writes the total.
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
