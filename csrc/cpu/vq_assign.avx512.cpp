#if defined(__x86_64__)
#define UEFL_KERNEL_BODY
#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
const VqAssignKernel vq_assign_avx512 = kKernel;
}
#endif
