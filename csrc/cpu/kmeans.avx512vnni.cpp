#if defined(__x86_64__)
#include "cpu/kmeans_digits.h"

namespace uefl::cpu {
const GridKernel grid_avx512vnni = kDigits;
}  // namespace uefl::cpu
#endif
