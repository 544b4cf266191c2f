// A barrier of all thread blocks of a cooperative launch. tests/cpp/cuda/emulation.h has the same function
// for the CPU.
#pragma once

#if defined(__CUDACC__)
#include <cooperative_groups.h>

namespace uefl::cuda {
namespace {

// Waits for all thread blocks. After the barrier, all thread blocks read the values that any thread block
// wrote before it.
__device__ inline void grid_barrier() { cooperative_groups::this_grid().sync(); }

}  // namespace
}  // namespace uefl::cuda
#endif
