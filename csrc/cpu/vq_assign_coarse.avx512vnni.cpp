#if defined(__x86_64__)
#include "cpu/vq_assign_i16.h"

namespace uefl::cpu {
const CoarseKernel vq_assign_coarse_avx512vnni = kKernel;
}
#endif
