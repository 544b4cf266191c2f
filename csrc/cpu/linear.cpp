#include "cpu/linear.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "cpu/cache_line.h"
#include "cpu/features.h"

namespace uefl::cpu {
namespace {

std::unique_ptr<CacheLine[]> lines(int64_t bytes) {
  return std::unique_ptr<CacheLine[]>(new CacheLine[(bytes + sizeof(CacheLine) - 1) / sizeof(CacheLine)]);
}

#if defined(__x86_64__)
constexpr int64_t kPanel = 32;  // units; two tiles, as linear.amx.cpp packs them
constexpr int64_t kShare = 64;  // rows of a task

bool tiles_pay(const LinearOperands& op) {
  if (isa() < Isa::amx || op.inputs == 0) return false;
  return on_every_shape() || (op.rows >= 512 && op.inputs >= 128 && op.outputs >= 64);
}

// Returns true if the largest magnitude of each unit or row is zero or in [2^-40, 2^40). Then no part
// overflows. AMX flushes subnormal numbers to zero, which then loses less than 2^-46 of the product of the
// largest magnitudes of the row and the unit.
bool holds(const std::vector<uint32_t>& largest) {
  constexpr uint32_t kLeast = 0x2b800000u, kBeyond = 0x53800000u;  // 2^-40 and 2^40
  return std::all_of(largest.begin(), largest.end(),
                     [](uint32_t bits) { return bits == 0 || (bits >= kLeast && bits < kBeyond); });
}

// Computes y on AMX tiles. Returns false if three bfloat16 do not hold one of the values; y is then
// undefined.
bool on_tiles(const LinearOperands& op, const Parallel& parallel) {
  const int64_t panels = (op.outputs + kPanel - 1) / kPanel, panel_bytes = linear_amx.panel_bytes(op.inputs);
  const std::unique_ptr<CacheLine[]> packed = lines(panels * panel_bytes);
  std::vector<float> base(panels * kPanel);
  std::copy_n(op.bias, op.outputs, base.begin());
  std::atomic<bool> held = true;
  parallel(panels, [&](int64_t lo, int64_t hi) {
    for (int64_t panel = lo; panel < hi && held; ++panel) {
      std::vector<uint32_t> largest(kPanel);
      linear_amx.pack(op.weight, op.inputs, op.outputs, panel, packed[0].bytes + panel * panel_bytes,
                      largest.data());
      if (!holds(largest)) held = false;
    }
  });
  if (!held) return false;
  parallel((op.rows + kShare - 1) / kShare, [&](int64_t lo, int64_t hi) {
    const int64_t first = lo * kShare, last = std::min(hi * kShare, op.rows);
    const std::unique_ptr<CacheLine[]> work = lines(linear_amx.work_bytes);
    std::vector<uint32_t> largest(last - first);
    linear_amx.run(op.x, first, last, op.inputs, packed[0].bytes, base.data(), op.outputs, work[0].bytes,
                   op.y, largest.data());
    if (!holds(largest)) held = false;
  });
  return held;
}
#endif

const LinearKernel& kernel() { return pick<&linear_portable, &linear_avx2, &linear_avx512>(); }

}  // namespace

void linear(const LinearOperands& op, const Parallel& parallel) {
  if (op.rows == 0 || op.outputs == 0) return;
#if defined(__x86_64__)
  if (tiles_pay(op) && on_tiles(op, parallel)) return;
#endif
  // Few rows are divided by units, so that each unit is packed once.
  constexpr int64_t kFewRows = 512, kFewUnits = 128;
  constexpr int64_t kLeastProducts = int64_t{1} << 20;  // products of a task
  const LinearKernel& chosen = kernel();
  const int64_t group = op.rows < kFewRows ? kFewUnits : chosen.most_units;
  const int64_t pieces =
      (op.rows + chosen.tile_rows - 1) / chosen.tile_rows * ((op.outputs + group - 1) / group);
  const int64_t share =
      1 + kLeastProducts / (chosen.tile_rows * std::min(op.outputs, group) * std::max<int64_t>(op.inputs, 1));
  parallel((pieces + share - 1) / share, [&](int64_t lo, int64_t hi) {
    const std::unique_ptr<CacheLine[]> work =
        lines(chosen.work_floats(group) * static_cast<int64_t>(sizeof(float)));
    chosen.run(op, group, lo * share, std::min(hi * share, pieces), reinterpret_cast<float*>(work.get()));
  });
}

}  // namespace uefl::cpu
