#if defined(__x86_64__)
#define UEFL_KERNEL_BODY
#include "cpu/kmeans_kernel.h"
#include "cpu/kmeans_seeding_kernel.h"

namespace uefl::cpu {
const KMeansKernel kmeans_avx512 = kKMeans;
const SeedingKernel seeding_avx512 = kSeeding;
}  // namespace uefl::cpu
#endif
