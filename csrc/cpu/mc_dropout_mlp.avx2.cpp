#if defined(__x86_64__)
#define UEFL_KERNEL_BODY
#include "cpu/mc_dropout_mlp_kernel.h"

namespace uefl::cpu {
const McKernel mc_avx2{kLanes, kMostOutputs, run};
}
#endif
