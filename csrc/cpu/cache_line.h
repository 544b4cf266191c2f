// The unit of aligned memory of the kernels.
#pragma once

namespace uefl::cpu {

struct alignas(64) CacheLine {
  char bytes[64];
};

}  // namespace uefl::cpu
