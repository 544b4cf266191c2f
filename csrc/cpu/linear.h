// Computes y = x weight^T + bias in float32, with the same bits for any number of threads. MC-dropout heads
// use it for the layers before the first dropout.
#pragma once

#include "cpu/linear_kernel.h"
#include "cpu/threads.h"

namespace uefl::cpu {

// Uses AMX tiles if there are enough rows and three bfloat16 hold each value, otherwise float32.
void linear(const LinearOperands& operands, const Parallel& parallel);

}  // namespace uefl::cpu
