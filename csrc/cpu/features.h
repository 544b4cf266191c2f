// The instruction set that the kernels run on: the best one of this CPU, or the one that UEFL_CPU names.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace uefl::cpu {

enum class Isa { portable, avx2, avx512, avx512vnni, amx };  // each one includes all before it

// Returns the instruction set, which is chosen at the first call. Throws std::runtime_error if UEFL_CPU is
// not a variant, or is one that this CPU cannot run.
Isa isa();

// Returns true if UEFL_CPU_EVERY_SHAPE is set. The instruction set then runs on every shape, even if a
// simpler one is faster. Tests use this.
bool on_every_shape();

// Returns true if the CPU computes a vector of 256 bits as two of 128 (Zen 1). Integer products are then no
// faster than products in float32.
bool splits_vectors();

const char* name(Isa isa);

// Returns the best variant of a kernel for the instruction set in use.
template <const auto* portable, const auto* avx2, const auto* avx512, const auto* avx512vnni = avx512>
const auto& pick() {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512vnni) return *avx512vnni;
  if (isa() >= Isa::avx512) return *avx512;
  if (isa() >= Isa::avx2) return *avx2;
#endif
  return *portable;
}

// Returns each feature that a variant needs, and whether this CPU and its operating system have it.
std::vector<std::pair<std::string, bool>> features();

}  // namespace uefl::cpu
