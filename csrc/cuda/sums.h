// Sums over many thread blocks, whose bits do not depend on the order of the thread blocks. Integers are
// added in any order, and the errors of vq in a fixed order.
#pragma once

#include <cstdint>

#include "cuda/rows.h"

namespace uefl::cuda {

// Arrays that the packing of a codebook clears. They are outside the unnamed namespace, because a launcher in
// another file takes them.
constexpr int kSpans = 5;
struct Spans {
  long long* begin[kSpans];
  int64_t size[kSpans];
};

// The sum of the errors times a factor, in float64, and also in float32 if the pointer is not null.
struct Total {
  double* sum;
  float* rounded;
  double factor;
  double* parts;      // one for each thread block of the grid
  long long* adders;  // number of adders that are done; zeroed by the caller
};

namespace {

#if defined(__CUDACC__)
// Reductions at a global address. Nothing is fetched, and the second-level cache adds the values of a warp
// for the same 32 bytes at once.
__device__ inline void add_to(long long* target, long long value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(target)),
               "l"(value));
}
__device__ inline void raise_to(long long* target, long long value) {
  asm volatile("red.relaxed.gpu.global.max.s64 [%0], %1;" ::"l"(__cvta_generic_to_global(target)),
               "l"(value));
}
#else
inline void add_to(long long* target, long long value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(value));
}
inline void raise_to(long long* target, long long value) {  // values must not be negative
  atomicMax(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(value));
}
#endif

// Returns the codeword of an output, counted over all codebooks.
__device__ inline int code_of(const Shape& shape, const int64_t* indices, int64_t output) {
  const int64_t codebook = shape.codebooks == 1 ? 0 : output % shape.codebooks;
  return static_cast<int>(codebook * shape.k + indices[output]);
}

// Returns true in the first lane of those with a common number. `same` is the mask of these lanes.
__device__ inline bool is_first_lane(unsigned same) {
  return __ffs(same) - 1 == static_cast<int>(threadIdx.x % kWarp);
}

// Returns the sum of squared differences.
template <int kCount>
__device__ double squares(const double (&a)[kCount], const double (&b)[kCount]) {
  double total = 0;
  UEFL_UNROLL
  for (int i = 0; i < kCount; ++i) total += (a[i] - b[i]) * (a[i] - b[i]);
  return total;
}

// Sums float32 squares in float32 with one conversion, or in float64 if they overflow or nearly underflow.
template <int kCount>
__device__ double squares(const float (&a)[kCount], const float (&b)[kCount]) {
  static_assert(kCount <= 8);
  float total = 0;
  UEFL_UNROLL
  for (int i = 0; i < kCount; ++i) total += (a[i] - b[i]) * (a[i] - b[i]);
  if (total >= 1e-30f && total < INFINITY) return total;
  double exact[2][kCount];
  UEFL_UNROLL
  for (int i = 0; i < kCount; ++i) exact[0][i] = a[i], exact[1][i] = b[i];
  return squares(exact[0], exact[1]);
}

// Stores the part of one thread block or warp. Returns true for the last one, which adds up all parts.
__device__ inline bool leave_part(double part, const Total& total, unsigned adder, unsigned adders) {
  total.parts[adder] = part;
  __threadfence();
  const bool last = atomicAdd(reinterpret_cast<unsigned long long*>(total.adders), 1ull) == adders - 1;
  __threadfence();
  return last;
}
__device__ inline double parts_of(const Total& total, unsigned first, unsigned step, unsigned adders) {
  double sum = 0;
  for (unsigned adder = first; adder < adders; adder += step) sum += __ldcg(total.parts + adder);
  return sum;
}
__device__ inline void write_sum(double sum, const Total& total) {
  *total.sum = sum * total.factor;
  if (total.rounded != nullptr) *total.rounded = static_cast<float>(sum * total.factor);
}

// Returns the sum over the threads of the thread block, in a fixed order, to the first thread.
__device__ inline double block_sum(double value) {
  __shared__ double of_warps[32];
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  for (unsigned warp = 0; threadIdx.x == 0 && warp < blockDim.x / kWarp; ++warp) sum += of_warps[warp];
  __syncthreads();
  return sum;
}

// Adds up a value of all threads of the grid. Every thread calls it once. The last thread block to arrive
// adds up the parts of all thread blocks, in a fixed order.
__device__ inline void add_up(double value, const Total& total) {
  __shared__ bool last;
  const double part = block_sum(value);
  if (threadIdx.x == 0) last = leave_part(part, total, blockIdx.x, gridDim.x);
  __syncthreads();
  if (!last) return;
  const double sum = block_sum(parts_of(total, threadIdx.x, blockDim.x, gridDim.x));
  if (threadIdx.x == 0) write_sum(sum, total);
}

__device__ inline void clear_spans(const Spans& spans) {
  UEFL_UNROLL
  for (int i = 0; i < kSpans; ++i) {
    for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < spans.size[i];
         at += int64_t{gridDim.x} * blockDim.x) {
      spans.begin[i][at] = 0;
    }
  }
}

}  // namespace
}  // namespace uefl::cuda
