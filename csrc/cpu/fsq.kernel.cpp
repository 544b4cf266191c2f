// Finite scalar quantization of a tile of rows. The number of elements is a multiple of the lanes.
#include "cpu/fsq_kernel.h"
#include "cpu/simd.h"
#include "cpu/variant.h"

namespace uefl::cpu {
namespace {

void levels(const float* z, const float* thresholds, int64_t steps, int64_t n, int32_t* level) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats x, threshold;
    Ints reached{};
    load(z + i, x);
    for (int64_t step = 0; step < steps; ++step) {
      load(thresholds + step * n + i, threshold);
      reached -= (Ints)(x >= threshold);  // true is -1
    }
    store(reached, level + i);
  }
}

void values(const float* z, const int32_t* level, const float* scale, const float* center,
            const float* divisor, int64_t n, float* quantized) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats x, a, b, c;
    Ints k;
    load(z + i, x), load(level + i, k);
    load(scale + i, a), load(center + i, b), load(divisor + i, c);
    const Floats value = (__builtin_convertvector(k, Floats) * a - b) / c;
    store(x == x ? value : x, quantized + i);
  }
}

void backward(const float* grad, const float* z, const float* shift, const float* slope, bool clamp,
              int64_t n, float* grad_z) {
  const Floats zero{}, one = zero + 1.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats x, pull, offset, factor;
    load(z + i, x), load(grad + i, pull), load(shift + i, offset), load(slope + i, factor);
    x = magnitude(x + offset);
    pull = pull * factor;
    if (clamp) {
      store(x <= one ? pull : pull * zero, grad_z + i);
      continue;
    }
    Floats e = x * -2.0f;  // 1 - tanh^2 x = 4 e / (1 + e)^2
    small_exponential(e);
    store(pull * (4.0f * e / ((one + e) * (one + e))), grad_z + i);
  }
}

}  // namespace

const FsqKernel UEFL_VARIANT(fsq){levels, values, backward};

}  // namespace uefl::cpu
