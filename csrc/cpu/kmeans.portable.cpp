#define UEFL_KERNEL_BODY
#include "cpu/kmeans_kernel.h"

namespace uefl::cpu {
const KMeansKernel kmeans_portable = kKMeans;
const GridKernel grid_portable = kGrid;
}  // namespace uefl::cpu
