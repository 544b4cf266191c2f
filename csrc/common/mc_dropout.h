// The code that the MC-dropout kernels on CPU and CUDA share.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace uefl {

enum class McActivation { gelu, relu, silu, tanh };

namespace {  // internal linkage: see the note in cpu/strided_rows.h

constexpr int64_t kMcUnits = 8, kMcWords = 4;  // a Philox call gives 4 words: 16 bits for each of 8 units

// Returns the factor of a kept unit, if units with 16 bits below the threshold are dropped.
constexpr float dropout_scale(uint32_t threshold) {
  return static_cast<float>(65536.0 / (65536.0 - threshold));
}

}  // namespace
}  // namespace uefl
