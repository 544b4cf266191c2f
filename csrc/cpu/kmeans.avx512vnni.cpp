#if defined(__x86_64__)
#define UEFL_KERNEL_BODY
#include "cpu/kmeans_seeding_kernel.h"

namespace uefl::cpu {
const SeedingKernel seeding_avx512vnni = kSeeding;
}  // namespace uefl::cpu
#endif
