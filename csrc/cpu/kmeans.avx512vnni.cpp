#if defined(__x86_64__)
#define UEFL_KERNEL_BODY
#include "cpu/kmeans_kernel.h"

namespace uefl::cpu {
const GridKernel grid_avx512vnni = kGrid;
}  // namespace uefl::cpu
#endif
