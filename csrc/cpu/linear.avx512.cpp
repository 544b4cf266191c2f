#if defined(__x86_64__)
#define UEFL_KERNEL_BODY
#include "cpu/linear_kernel.h"

namespace uefl::cpu {
const LinearKernel linear_avx512 = kKernel;
}
#endif
