#define UEFL_KERNEL_BODY
#include "cpu/vq_backward_kernel.h"
#include "cpu/vq_kernel.h"

namespace uefl::cpu {
const VqKernel vq_portable{replace, add, backward};
}
