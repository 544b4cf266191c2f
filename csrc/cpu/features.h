// Which instruction set the kernels run on: the best that this CPU has, or the one that UEFL_CPU names, as if
// the CPU had no better one.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace uefl::cpu {

enum class Isa { portable, avx2, avx512, avx512vnni, amx };  // each one has all that the ones before it have

// Chosen at the first call. Throws std::runtime_error when UEFL_CPU is not a variant or is one that this CPU
// cannot run.
Isa isa();

// True when UEFL_CPU_EVERY_SHAPE is set: that instruction set then runs on every shape, also where a simpler
// one is faster. For tests.
bool on_every_shape();

const char* name(Isa isa);

// The best variant of a kernel that the instruction set in use has.
template <const auto* portable, const auto* avx2, const auto* avx512, const auto* avx512vnni = avx512>
const auto& pick() {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512vnni) return *avx512vnni;
  if (isa() >= Isa::avx512) return *avx512;
  if (isa() >= Isa::avx2) return *avx2;
#endif
  return *portable;
}

// Each feature that a variant needs, and whether this CPU (and its operating system) has it.
std::vector<std::pair<std::string, bool>> features();

}  // namespace uefl::cpu
