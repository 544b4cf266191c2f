// Instructions that the variants and the micro-measurements use in addition to csrc/cuda/hopper.h.
#pragma once

#include <cstdint>

#include "cuda/hopper.h"
#include "cuda/mma.h"

namespace uefl::variants {
namespace {

using namespace uefl::cuda;

#if defined(__CUDACC__)  // tests/cpp/test_cuda_variants.cpp has these for the CPU
__device__ inline long long now() {
  long long clock;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
  return clock;
}

// Wait for a turn or pass it, at a named barrier of two warpgroups. The warpgroup that passes the turn does
// not wait.
__device__ inline void turn_wait(int name) { asm volatile("bar.sync %0, 256;" ::"r"(name) : "memory"); }
__device__ inline void turn_pass(int name) { asm volatile("bar.arrive %0, 256;" ::"r"(name) : "memory"); }

__device__ inline void group_sync() { asm volatile("bar.sync 7, 128;" ::: "memory"); }  // of one warpgroup
#endif

// Loads fragments of 16 rows of a warp and 16 elements from a tile of 64 x 64 in the layout of operand().
__device__ inline void load_fragment(uint32_t (&fragment)[4], const unsigned char* tile, int step) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  load_matrices(fragment, tile + (warp * 16 + lane % 16) * 128 + ((2 * step + lane / 16) ^ (lane & 7)) * 16);
}

}  // namespace
}  // namespace uefl::variants
