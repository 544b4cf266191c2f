#define UEFL_KERNEL_BODY
#include "cpu/kmeans_kernel.h"
#include "cpu/kmeans_seeding_kernel.h"

namespace uefl::cpu {
const KMeansKernel kmeans_portable = kKMeans;
const SeedingKernel seeding_portable = kSeeding;
}  // namespace uefl::cpu
