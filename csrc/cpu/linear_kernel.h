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

// The product, divided into tasks [groups of units][tiles of rows]. A unit is an output with its weights.
// run() computes tasks [lo, hi) and packs the weights of the units that these tasks need. Thread-safe.
struct LinearKernel {
  int64_t tile_rows, most_units;                // rows of a tile; units of a group
  int64_t (*work_floats)(int64_t group_units);  // aligned to 64 bytes
  void (*run)(const LinearOperands& operands, int64_t group_units, int64_t lo, int64_t hi, float* work);
};

extern const LinearKernel linear_portable, linear_avx2, linear_avx512;

// The functions of linear.amx.cpp. Each float32 is the sum of three bfloat16 parts, and six of the nine
// products of parts give all bits of a float32. `packed` is [panels of 32 units][steps of 32 inputs][3
// parts][2] tiles. `largest` has the largest magnitude of each of the 32 units, or of each row, as bits. The
// functions only raise these values, so the caller sets them to zero first. `base` is the bias, padded with
// zeros to a whole panel.
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
