// y = x weight^T + bias in float32, with the same bits whatever the number of threads. What comes before the
// first dropout of an MC-dropout head is such a product.
#pragma once

#include "cpu/linear_kernel.h"
#include "cpu/threads.h"

namespace uefl::cpu {

// On the tiles of AMX where there are enough rows to pay for them and three bfloat16 hold each value, in
// float32 elsewhere.
void linear(const LinearOperands& operands, const Parallel& parallel);

}  // namespace uefl::cpu
