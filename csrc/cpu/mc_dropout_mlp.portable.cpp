#define UEFL_KERNEL_BODY
#include "cpu/mc_dropout_mlp_kernel.h"

namespace uefl::cpu {
const McKernel mc_portable{kLanes, kMostOutputs, run};
}
