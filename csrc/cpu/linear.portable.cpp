#define UEFL_KERNEL_BODY
#include "cpu/linear_kernel.h"

namespace uefl::cpu {
const LinearKernel linear_portable = kKernel;
}
