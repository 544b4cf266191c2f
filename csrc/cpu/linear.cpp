#include "cpu/linear.h"

#include <algorithm>
#include <vector>

#include "cpu/features.h"

namespace uefl::cpu {

#if defined(__x86_64__)
namespace {

constexpr int64_t kPanel = 32;  // units: two tiles, as linear.amx.cpp packs them

bool holds(const std::vector<uint32_t>& largest) {
  constexpr uint32_t kLeast = 0x2b800000u, kBeyond = 0x53800000u;  // 2^-40 and 2^40
  return std::all_of(largest.begin(), largest.end(), [](uint32_t bits) { return bits == 0 || (bits >= kLeast && bits < kBeyond); });
}

}  // namespace

bool linear_pays(int64_t rows, int64_t inputs, int64_t outputs) {
  if (isa() < Isa::amx || rows == 0 || inputs == 0 || outputs == 0) return false;
  return on_every_shape() || (rows >= 512 && inputs >= 128 && outputs >= 64);
}

Linear::Linear(const float* weight, const float* bias, int64_t inputs, int64_t outputs)
    : weight_(weight),
      inputs_(inputs),
      outputs_(outputs),
      packed_(lines(panels() * linear_amx.panel_bytes(inputs))),
      bias_(new float[panels() * kPanel]()) {
  std::copy_n(bias, outputs, bias_.get());
}

int64_t Linear::panels() const { return (outputs_ + kPanel - 1) / kPanel; }

bool Linear::pack(int64_t lo, int64_t hi) {
  std::vector<uint32_t> largest(kPanel);
  for (int64_t panel = lo; panel < hi; ++panel) {
    linear_amx.pack(weight_, inputs_, outputs_, panel, packed_[0].bytes + panel * linear_amx.panel_bytes(inputs_), largest.data());
    if (!holds(largest)) return false;
    std::fill(largest.begin(), largest.end(), 0);
  }
  return true;
}

bool Linear::run(const float* x, int64_t lo, int64_t hi, float* y) const {
  const std::unique_ptr<Line[]> work = lines(linear_amx.work_bytes);
  std::vector<uint32_t> largest(hi - lo);
  linear_amx.run(x, lo, hi, inputs_, packed_[0].bytes, bias_.get(), outputs_, work[0].bytes, y, largest.data());
  return holds(largest);
}
#else
bool linear_pays(int64_t, int64_t, int64_t) { return false; }
#endif

}  // namespace uefl::cpu
