#include "cpu/linear.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <vector>

#include "cpu/features.h"

namespace uefl::cpu {

#if defined(__x86_64__)
namespace {

// Where the largest magnitude is in [2^-40, 2^40), or nothing but zero: no part overflows, and what falls among the subnormal numbers,
// which AMX takes for zero, is below 2^-86 of it.
bool holds(uint32_t largest) { return largest == 0 || (largest >= 0x2b800000u && largest < 0x53800000u); }

// What the three parts do not hold: values that are not finite, and rows and units of extreme size.
float multiply(const float* x, const float* unit, int64_t inputs, float bias) {
  double sum = bias;
  for (int64_t j = 0; j < inputs; ++j) sum += static_cast<double>(x[j]) * unit[j];
  return static_cast<float>(sum);
}

}  // namespace

bool linear_pays(int64_t rows, int64_t inputs, int64_t outputs) {
  if (isa() < Isa::amx || rows == 0 || inputs == 0 || outputs == 0) return false;
  return on_every_shape() || (rows >= 512 && inputs >= 128 && outputs >= 64);
}

Linear::Linear(const float* weight, const float* bias, int64_t inputs, int64_t outputs)
    : weight_(weight),
      bias_(bias),
      inputs_(inputs),
      outputs_(outputs),
      packed_(lines(panels() * linear_amx.panel_bytes(inputs))),
      base_(new float[panels() * kLinearPanel]()),
      largest_(new uint32_t[outputs]()) {
  std::copy_n(bias, outputs, base_.get());
}

int64_t Linear::panels() const { return (outputs_ + kLinearPanel - 1) / kLinearPanel; }

void Linear::pack(int64_t lo, int64_t hi) {
  for (int64_t panel = lo; panel < hi; ++panel) {
    linear_amx.pack(weight_, inputs_, outputs_, panel, packed_[0].bytes + panel * linear_amx.panel_bytes(inputs_), largest_.get());
  }
}

void Linear::run(const float* x, int64_t lo, int64_t hi, float* y) const {
  const std::unique_ptr<Line[]> work = lines(linear_amx.work_bytes);
  std::vector<uint32_t> largest(hi - lo);
  linear_amx.run(x, lo, hi, inputs_, packed_[0].bytes, base_.get(), outputs_, work[0].bytes, y, largest.data());
  std::vector<int64_t> all(outputs_), extreme;
  std::iota(all.begin(), all.end(), 0);
  std::copy_if(all.begin(), all.end(), std::back_inserter(extreme), [&](int64_t unit) { return !holds(largest_[unit]); });
  for (int64_t row = lo; row < hi; ++row) {
    for (const int64_t unit : holds(largest[row - lo]) ? extreme : all) {
      y[row * outputs_ + unit] = multiply(x + row * inputs_, weight_ + unit * inputs_, inputs_, bias_[unit]);
    }
  }
}
#else
bool linear_pays(int64_t, int64_t, int64_t) { return false; }
#endif

}  // namespace uefl::cpu
