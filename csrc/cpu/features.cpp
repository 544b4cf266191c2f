#include "cpu/features.h"

#include <cstdlib>
#include <stdexcept>

namespace uefl::cpu {
namespace {

bool supported(Isa isa) {
  bool all = true;
  for (const auto& [feature, present] : features()) {
    const bool needed = feature.rfind("avx512", 0) == 0 ? isa == Isa::avx512 : isa != Isa::portable;
    all = all && (present || !needed);
  }
#if !defined(__x86_64__)
  all = isa == Isa::portable;
#endif
  return all;
}

Isa choose() {
  const char* forced = std::getenv("UEFL_CPU");
  if (forced && !*forced) forced = nullptr;  // UEFL_CPU= means unset
  for (const Isa isa : {Isa::avx512, Isa::avx2, Isa::portable}) {
    if (forced && std::string(forced) != name(isa)) continue;
    if (supported(isa)) return isa;
    if (forced) throw std::runtime_error("UEFL_CPU=" + std::string(forced) + " needs instructions that this CPU lacks; unset it");
  }
  throw std::runtime_error("UEFL_CPU=" + std::string(forced) + " is not a variant; use one of avx512, avx2, portable, or unset it");
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "portable"; }

std::vector<std::pair<std::string, bool>> features() {
#if defined(__x86_64__)
  return {{"avx2", __builtin_cpu_supports("avx2")},         {"fma", __builtin_cpu_supports("fma")},
          {"avx512f", __builtin_cpu_supports("avx512f")},   {"avx512dq", __builtin_cpu_supports("avx512dq")},
          {"avx512bw", __builtin_cpu_supports("avx512bw")}, {"avx512vl", __builtin_cpu_supports("avx512vl")}};
#else
  return {};
#endif
}

}  // namespace uefl::cpu
