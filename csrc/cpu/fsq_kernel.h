// Finite scalar quantization of a tile of rows: the interface that each instruction set implements.
#pragma once

#include <cstdint>

namespace uefl::cpu {

constexpr int64_t kFsqRows = 16;  // rows of a tile: a multiple of the lanes of every instruction set

struct FsqKernel {
  // Writes the level of each of n elements: how many of its thresholds [steps, n] it reaches.
  void (*levels)(const float* z, const float* thresholds, int64_t steps, int64_t n, int32_t* level);
  // Writes the quantized elements, (level scale - center) / divisor, or NaN where z is NaN.
  void (*values)(const float* z, const int32_t* level, const float* scale, const float* center,
                 const float* divisor, int64_t n, float* quantized);
  // Writes the gradient of n elements.
  void (*backward)(const float* grad, const float* z, const float* shift, const float* slope, bool clamp,
                   int64_t n, float* grad_z);
};

extern const FsqKernel fsq_portable, fsq_avx2, fsq_avx512;

}  // namespace uefl::cpu
