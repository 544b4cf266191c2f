// The kernels of the product in float32.
#pragma once

#include <cstdint>

namespace uefl::cpu {

// The operands: x [rows, inputs], weight [outputs, inputs], bias [outputs], y [rows, outputs].
struct LinearOperands {
  const float *x, *weight, *bias;
  float* y;
  int64_t rows, inputs, outputs;
};

// The product in tasks. The work is [groups of units][tiles of rows]. run() computes tasks [lo, hi) and packs
// the units that these need. Thread-safe.
struct LinearKernel {
  int64_t tile_rows, most_units;                // rows of a tile; units of a group
  int64_t (*work_floats)(int64_t group_units);  // aligned to 64 bytes
  void (*run)(const LinearOperands& operands, int64_t group_units, int64_t lo, int64_t hi, float* work);
};

extern const LinearKernel linear_portable, linear_avx2, linear_avx512;

// The parts of linear.amx.cpp. Each value is the sum of three bfloat16, and six of the nine products give all
// bits of a float32. `packed` is [panels of 32 units][steps of 32 inputs][3 parts][2] tiles. `largest` is the
// magnitude of a unit (of 32) or row, as bits; the kernel raises it, so it starts at zero. `base` is the
// bias, padded with zeros to a whole panel.
struct LinearTiles {
  int64_t work_bytes;
  int64_t (*panel_bytes)(int64_t inputs);
  void (*pack)(const float* weight, int64_t inputs, int64_t outputs, int64_t panel, char* packed,
               uint32_t* largest);
  void (*run)(const float* x, int64_t lo, int64_t hi, int64_t inputs, const char* packed, const float* base,
              int64_t outputs, char* work, float* y, uint32_t* largest);
};

extern const LinearTiles linear_amx;

}  // namespace uefl::cpu
