#include "cpu/features.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace uefl::cpu {
namespace {

#if defined(UEFL_EMULATE_AMX)
constexpr bool kEmulated = true;  // tests/cpp/emulated_amx.h
#else
constexpr bool kEmulated = false;
#endif

#if defined(__x86_64__)
// Linux grants a process the AMX registers on request only.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Returns the first variant that needs the feature. All better variants need it too.
Isa needed_by(const std::string& feature) {
  if (feature.rfind("amx", 0) == 0 || feature == "avx512bf16") return Isa::amx;
  if (feature == "avx512vnni") return Isa::avx512vnni;
  return feature.rfind("avx512", 0) == 0 ? Isa::avx512 : Isa::avx2;
}

bool supported(Isa isa) {
#if !defined(__x86_64__)
  return isa == Isa::portable;
#endif
  for (const auto& [feature, present] : features()) {
    if (isa >= needed_by(feature) && !present) return false;
  }
  return true;
}

// Returns the value of an environment variable, or null if it is unset or empty.
const char* setting(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value ? value : nullptr;
}

Isa choose() {
  const char* forced = setting("UEFL_CPU");
  for (const Isa isa : {Isa::amx, Isa::avx512vnni, Isa::avx512, Isa::avx2, Isa::portable}) {
    if (forced && std::string(forced) != name(isa)) continue;
    if (supported(isa)) return isa;
    if (forced)
      throw std::runtime_error("UEFL_CPU=" + std::string(forced) +
                               " needs instructions that this CPU lacks; unset UEFL_CPU");
  }
  throw std::runtime_error(
      "UEFL_CPU=" + std::string(forced) +
      " is not a variant; set UEFL_CPU to amx, avx512vnni, avx512, avx2 or portable, or unset it");
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

bool on_every_shape() {
  static const bool always = setting("UEFL_CPU_EVERY_SHAPE") != nullptr;
  return always;
}

bool splits_vectors() {
#if defined(__x86_64__)
  return __builtin_cpu_is("znver1");
#else
  return false;
#endif
}

const char* name(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return "amx";
    case Isa::avx512vnni:
      return "avx512vnni";
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::portable:
      break;
  }
  return "portable";
}

std::vector<std::pair<std::string, bool>> features() {
#if defined(__x86_64__)
  static const bool tiles = kEmulated || (__builtin_cpu_supports("amx-tile") && tiles_permitted());
  return {{"avx2", __builtin_cpu_supports("avx2")},
          {"fma", __builtin_cpu_supports("fma")},
          {"avx512f", __builtin_cpu_supports("avx512f")},
          {"avx512dq", __builtin_cpu_supports("avx512dq")},
          {"avx512bw", __builtin_cpu_supports("avx512bw")},
          {"avx512vl", __builtin_cpu_supports("avx512vl")},
          {"avx512vnni", __builtin_cpu_supports("avx512vnni")},
          {"avx512bf16", __builtin_cpu_supports("avx512bf16")},
          {"amx-tile", tiles},
          {"amx-bf16", kEmulated || __builtin_cpu_supports("amx-bf16")},
          {"amx-int8", kEmulated || __builtin_cpu_supports("amx-int8")}};
#else
  return {};
#endif
}

}  // namespace uefl::cpu
