#if defined(__SSE2__)
#include "cpu/vq_assign_i16.h"

namespace uefl::cpu {
const CoarseKernel vq_assign_coarse_portable = kKernel;
}
#endif
