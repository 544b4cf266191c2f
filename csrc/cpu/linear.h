// y = x weight^T + bias in float32, on the tiles of AMX, which multiply bfloat16: each value is the sum of three of them, and six of the
// nine products reach the last bits of a float32. What comes before the first dropout of an MC-dropout head is such a product.
#pragma once

#include <cstdint>
#include <memory>

namespace uefl::cpu {

// True where this is faster than a product of float32: on AMX, and with enough rows to pay for the packing of the weights.
bool linear_pays(int64_t rows, int64_t inputs, int64_t outputs);

#if defined(__x86_64__)
class Linear {
 public:
  // weight [outputs, inputs] and bias [outputs] stay with the caller until packed.
  Linear(const float* weight, const float* bias, int64_t inputs, int64_t outputs);

  int64_t panels() const;  // of 32 units
  // The units of panels [lo, hi). Thread-safe, and to be done before run(). False when three bfloat16 do not hold one of them: the largest
  // magnitude of a unit, or of a row, must be zero or in [2^-40, 2^40). Then no part overflows, and what is lost among the subnormal
  // numbers, which AMX takes for zero, is below 2^-46 of the largest of the row times the largest of the unit.
  bool pack(int64_t lo, int64_t hi);
  // Rows [lo, hi) of x [rows, inputs] to those of y [rows, outputs]. Thread-safe; a row's bits do not depend on the others. False as above;
  // the results of that row then have no meaning.
  bool run(const float* x, int64_t lo, int64_t hi, float* y) const;

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  static std::unique_ptr<Line[]> lines(int64_t bytes) { return std::unique_ptr<Line[]>(new Line[bytes / sizeof(Line)]); }

  const float* weight_;
  int64_t inputs_, outputs_;
  std::unique_ptr<Line[]> packed_;
  std::unique_ptr<float[]> bias_;  // and zeros up to a whole panel
};

// The parts of linear.amx.cpp; packed is [panels][steps of 32 inputs][3 parts][2] tiles. largest: magnitude of a unit (of 32) or row, as
// bits; it is raised, so it begins at zero.
struct LinearTiles {
  int64_t work_bytes;
  int64_t (*panel_bytes)(int64_t inputs);
  void (*pack)(const float* weight, int64_t inputs, int64_t outputs, int64_t panel, char* packed, uint32_t* largest);
  void (*run)(const float* x, int64_t lo, int64_t hi, int64_t inputs, const char* packed, const float* base, int64_t outputs, char* work,
              float* y, uint32_t* largest);
};

extern const LinearTiles linear_amx;
#endif

}  // namespace uefl::cpu
