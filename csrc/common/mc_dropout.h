// What the MC-dropout kernels of the CPU and of CUDA share.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace uefl {

enum class McActivation { gelu, relu, silu, tanh };

namespace {  // internal linkage: see the note in cpu/strided_rows.h

constexpr int64_t kMcUnits = 8, kMcWords = 4;  // units of one Philox call, 16 bits each, and its words

// What a kept unit is multiplied by, where those are dropped whose 16 bits are below the threshold.
constexpr float dropout_scale(uint32_t threshold) {
  return static_cast<float>(65536.0 / (65536.0 - threshold));
}

}  // namespace
}  // namespace uefl
