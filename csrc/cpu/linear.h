// y = x weight^T + bias in float32, on the tiles of AMX, which multiply bfloat16: each value is the sum of three of them, and six of the
// nine products reach the last bit of a float32. What comes before the first dropout of an MC-dropout head is such a product.
#pragma once

#include <cstdint>
#include <memory>

namespace uefl::cpu {

// True where this is faster than a product of float32: on AMX, and with enough rows to pay for the packing of the weights.
bool linear_pays(int64_t rows, int64_t inputs, int64_t outputs);

constexpr int64_t kLinearPanel = 32;  // units that are packed, and multiplied, together

class Linear {
 public:
  // weight [outputs, inputs] and bias [outputs] stay with the caller; both are needed until the last call of run().
  Linear(const float* weight, const float* bias, int64_t inputs, int64_t outputs);

  int64_t panels() const;
  // The units of panels [lo, hi). Thread-safe, and to be done before run().
  void pack(int64_t lo, int64_t hi);
  // Rows [lo, hi) of x [rows, inputs] to those of y [rows, outputs]. Thread-safe; a row's bits do not depend on the others.
  void run(const float* x, int64_t lo, int64_t hi, float* y) const;

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  static std::unique_ptr<Line[]> lines(int64_t bytes) { return std::unique_ptr<Line[]>(new Line[bytes / sizeof(Line)]); }

  const float *weight_, *bias_;
  int64_t inputs_, outputs_;
  std::unique_ptr<Line[]> packed_;
  std::unique_ptr<float[]> base_;        // the bias, and zeros up to a whole panel
  std::unique_ptr<uint32_t[]> largest_;  // magnitude of each unit, as bits
};

// The parts of linear.amx.cpp; packed is [panels][steps of 32 inputs][3 parts][2] tiles. largest: magnitude of a unit or row, as bits; it
// is raised, so it begins at zero.
struct LinearTiles {
  int64_t work_bytes;
  int64_t (*panel_bytes)(int64_t inputs);
  void (*pack)(const float* weight, int64_t inputs, int64_t outputs, int64_t panel, char* packed, uint32_t* largest);
  void (*run)(const float* x, int64_t lo, int64_t hi, int64_t inputs, const char* packed, const float* base, int64_t outputs, char* work,
              float* y, uint32_t* largest);
};

extern const LinearTiles linear_amx;

}  // namespace uefl::cpu
