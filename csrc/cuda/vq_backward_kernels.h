// vq_backward on CUDA computes the gradient of vq with respect to x.
//
// The computation is elementwise, except for the five dot products of the rotation (common/rotation.h). If
// all tensors are contiguous and nothing rotates, a thread takes four elements. Otherwise a warp takes a
// segment of a row and reads it once or twice. The second time, the segment is in the first-level cache. Wide
// is float, or double if x or the codebook is float64 or if the gradient is rotated.
#pragma once

#include <cstdint>

#include "common/multiply.h"
#include "common/rotation.h"
#include "cuda/rows.h"

namespace uefl::cuda {
namespace {

struct View {
  int64_t inner, outer_stride, inner_stride, stride;  // [outer, inner, segments * d], strides in elements

  // Returns the place of an element. A division of 64 bits costs more than the arithmetic of a row. Rows that
  // are evenly spaced need no division.
  __device__ int64_t begin(int64_t row, int64_t column) const {
    const int64_t gap = outer_stride - inner * inner_stride;
    return row * inner_stride + (gap == 0 ? 0 : row / inner * gap) + column * stride;
  }
};

struct BackwardShape {
  int64_t outputs, segments, codebooks, k, d;  // as in Shape
  View x, g, out;
  bool rotation;
};

// Computes the gradient with one warp for each segment. g is null if there is no gradient of `quantized`. An
// index out of range reads nothing and gives NaN.
template <class T, class Wide>
__global__ void __launch_bounds__(kThreads)
    backward(const T* x, const Wide* codewords, const int64_t* indices, const T* g, const double* pull,
             BackwardShape shape, T* out) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Wide strength = static_cast<Wide>(*pull);
  for (int64_t output = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
       output < shape.outputs; output += warps) {
    const int64_t row = shape.segments == 1 ? output : output / shape.segments,
                  segment = output - row * shape.segments;
    const int64_t column = segment * shape.d;
    const T* value = x + shape.x.begin(row, column);
    const T* gradient = g ? g + shape.g.begin(row, column) : nullptr;
    const int64_t index = indices[output];
    const bool inside = index >= 0 && index < shape.k;
    const Wide* codeword = codewords + ((shape.codebooks == 1 ? 0 : segment) * shape.k + index) * shape.d;
    T* target = out + shape.out.begin(row, column);
    Rotation turn{};
    if (g && shape.rotation) {
      RotationDots dots{};
      for (int64_t j = lane; j < shape.d; j += kWarp) {
        const double a = widen(value[j * shape.x.stride]), q = inside ? codeword[j] : Wide(NAN),
                     b = widen(gradient[j * shape.g.stride]);
        dots.xx += a * a, dots.qq += q * q, dots.xq += a * q, dots.xg += a * b, dots.qg += q * b;
      }
      turn = rotation(
          {warp_sum(dots.xx), warp_sum(dots.qq), warp_sum(dots.xq), warp_sum(dots.xg), warp_sum(dots.qg)});
    }
    for (int64_t j = lane; j < shape.d; j += kWarp) {
      const Wide a = widen(value[j * shape.x.stride]), q = inside ? codeword[j] : Wide(NAN);
      Wide result = multiply(a - q, strength);
      if (g) {
        const Wide b = widen(gradient[j * shape.g.stride]);
        result =
            (shape.rotation ? static_cast<Wide>(b * turn.scale + (a * turn.along + q * turn.towards)) : b) +
            result;
      }
      narrow(result, target[j * shape.out.stride]);
    }
  }
}

// Computes the gradient without rotation, for x, g and out of the same layout. d is a multiple of four, and
// addresses are aligned to Four.
template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_dense(const Four<T>* x, const Four<float>* codewords, const int64_t* indices, const Four<T>* g,
                   const double* pull, BackwardShape shape, Four<T>* out) {
  const auto strength = static_cast<float>(*pull);
  const int64_t width = shape.d / 4, threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < shape.outputs * width;
       i += threads) {
    const int64_t output = i / width, index = indices[output],
                  codebook = shape.codebooks == 1 ? 0 : output % shape.segments;
    const Four<T> value = x[i], gradient = g ? g[i] : Four<T>{};
    Four<float> codeword{{NAN, NAN, NAN, NAN}};
    if (index >= 0 && index < shape.k)
      codeword = codewords[(codebook * shape.k + index) * width + (i - output * width)];
    Four<T> result;
    UEFL_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float pulled = multiply(widen(value.values[j]) - codeword.values[j], strength);
      narrow(g ? widen(gradient.values[j]) + pulled : pulled, result.values[j]);
    }
    out[i] = result;
  }
}

}  // namespace
}  // namespace uefl::cuda
