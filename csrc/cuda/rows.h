// The rows of x as the CUDA kernels of the search and their followers see them, and functions of a warp.
#pragma once

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define UEFL_PRAGMA(text) _Pragma(#text)
#define UEFL_UNROLL _Pragma("unroll")  // keeps arrays of a thread in registers
#define UEFL_UNROLL_BY(count) UEFL_PRAGMA(unroll count)
#else
#define UEFL_UNROLL
#define UEFL_UNROLL_BY(count)
#endif

#include <cstdint>

namespace uefl::cuda {

struct Shape {
  int64_t outputs, segments, codebooks, d, k, padded_k;  // padded_k: k rounded up to 128
  int64_t inner, outer_stride, inner_stride, stride;  // x [outer, inner, segments * d], strides in elements
  bool euclidean;

  __device__ int64_t begin(int64_t output) const {
    const int64_t row = output / segments, segment = output % segments;
    return row / inner * outer_stride + row % inner * inner_stride + segment * d * stride;
  }
};

namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ constexpr bool is_half(float) { return false; }
__device__ constexpr bool is_half(double) { return false; }
#if defined(__CUDACC__)
__device__ constexpr bool is_half(__half) { return true; }
__device__ constexpr bool is_half(__nv_bfloat16) { return false; }
#endif

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
#if defined(__CUDACC__)
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
#endif

template <class T>
__device__ T warp_sum(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Rounds to the dtype of x as torch does: a float64 number goes to 16 bits through float32.
template <class Wide>
__device__ inline void narrow(Wide value, Wide& out) {
  out = value;
}
__device__ inline void narrow(double value, float& out) { out = static_cast<float>(value); }
#if defined(__CUDACC__)
template <class Wide>
__device__ inline void narrow(Wide value, __half& out) {
  out = __float2half_rn(static_cast<float>(value));
}
template <class Wide>
__device__ inline void narrow(Wide value, __nv_bfloat16& out) {
  out = __float2bfloat16_rn(static_cast<float>(value));
}
#endif

// Adjacent elements that are read or written in one access of at most 16 bytes.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Piece {
  T values[kCount];
};

template <class T>
using Four = Piece<T, 4>;
template <class T>
__device__ inline Four<T> load_four(const T* from) {
  return *reinterpret_cast<const Four<T>*>(from);
}

}  // namespace
}  // namespace uefl::cuda
