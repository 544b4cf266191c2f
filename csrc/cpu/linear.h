// y = x weight^T + bias in float32, with the same bits for any number of threads. MC-dropout heads use it for
// the layers before the first dropout.
#pragma once

#include "cpu/linear_kernel.h"
#include "cpu/threads.h"

namespace uefl::cpu {

// Uses AMX tiles where the rows are many enough and three bfloat16 hold each value, else float32.
void linear(const LinearOperands& operands, const Parallel& parallel);

}  // namespace uefl::cpu
