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

// A named barrier of two warpgroups: one waits for its turn, the other one hands it on and waits for nothing.
__device__ inline void turn_wait(int name) { asm volatile("bar.sync %0, 256;" ::"r"(name) : "memory"); }
__device__ inline void turn_pass(int name) { asm volatile("bar.arrive %0, 256;" ::"r"(name) : "memory"); }

__device__ inline void group_sync() { asm volatile("bar.sync 7, 128;" ::: "memory"); }  // of one warpgroup

// A cluster of blocks: the number of this block in it, a barrier of all their threads, an arrival at the
// barrier of another block.
__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ inline void arrive_at(Barrier* barrier, unsigned rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// To the same place of shared memory in every block of the mask; the barrier of each of them counts its
// bytes.
__device__ inline void copy_multicast(void* target, const void* source, unsigned bytes, Barrier* barrier,
                                      uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(target)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier)), "h"(mask)
      : "memory");
}

#define VARIANTS_SUMS(c)                                                                                    \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),           \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
      "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]),            \
      "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),            \
      "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]),            \
      "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]),            \
      "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]),            \
      "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]),            \
      "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])

// multiply_group() of a left operand in shared memory: 64 rows of 64 elements in the layout of operand().
__device__ inline void multiply_described(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, "
      "%27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
      "%47, %48, %49, %50, %51, "
      "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}"
      : VARIANTS_SUMS(c)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// Between what this thread wrote to shared memory and products that read it.
__device__ inline void written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// Fragments of 16 rows of a warp and 16 elements from a tile of 64 x 64 in the layout of operand().
__device__ inline void load_fragment(uint32_t (&fragment)[4], const unsigned char* tile, int step) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  load_matrices(fragment, tile + (warp * 16 + lane % 16) * 128 + ((2 * step + lane / 16) ^ (lane & 7)) * 16);
}

}  // namespace
}  // namespace uefl::variants
