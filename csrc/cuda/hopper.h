// The instructions of sm_90a for a search: barriers in shared memory that count bytes, bulk copies that
// report to them, and asynchronous products of a warpgroup (four warps) with the right operand in shared
// memory. tests/cpp/cuda/emulation_hopper.h has the same functions for the CPU, written from the PTX manual.
#pragma once

#include <cstdint>

#include "cuda/mma.h"
#include "cuda/rows.h"

#if defined(__CUDACC__)

namespace uefl::cuda {
namespace {

// A phase of a barrier ends when the given number of threads and all announced bytes have arrived.
using Barrier = uint64_t;
__device__ inline void barrier_init(Barrier* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Makes the barriers visible to all threads and to bulk copies. Call it after the last barrier_init().
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void barrier_arrive_expecting(Barrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Returns whether the phase with this parity is over. The phase before the first one has parity 1 and is
// over.
__device__ inline bool barrier_over(Barrier* barrier, unsigned parity) {
  unsigned over = 0;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}
__device__ inline void barrier_wait(Barrier* barrier, unsigned parity) {
  while (!barrier_over(barrier, parity)) continue;
}

// Returns the same pointer to shared memory, and lets the compiler keep it in a register. Otherwise the
// compiler would compute it again in every iteration of a loop.
template <class T>
__device__ inline T* kept_shared(T* pointer) {
  uint32_t address = shared_address(pointer);
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Makes this thread's writes to shared memory visible to the products that follow.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts a bulk copy from global to shared memory. Both addresses and the size are multiples of 16 bytes. The
// barrier counts the bytes.
__device__ inline void copy_bulk(void* target, const void* source, unsigned bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(target)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ inline void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the committed groups are in flight.
template <int kPending>
__device__ inline void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define UEFL_SUMS_NAMED                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define UEFL_SUMS(c)                                                                                        \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),           \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
      "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]),            \
      "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),            \
      "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]),            \
      "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]),            \
      "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]),            \
      "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]),            \
      "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])

// Computes c [64, 128] (+)= a [64, 16] b [128, 16]^T, with float16 operands and float32 sums. Thread 32 w + 4
// g + t of the warpgroup has rows 16 w + g and 16 w + g + 8. c[4 j] to c[4 j + 3] are columns 8 j + 2 t and 8
// j + 2 t + 1 of these rows. The left operand is the fragment of multiply_add().
__device__ inline void multiply_group(float (&c)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, "
      "0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " UEFL_SUMS_NAMED
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : UEFL_SUMS(c)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
// Computes the same with `a` in shared memory, in the layout of b.
__device__ inline void multiply_group(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, "
      "0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " UEFL_SUMS_NAMED "%64, %65, p, 1, 1, 0, 0;\n}"
      : UEFL_SUMS(c)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// Call it between a wait and the instructions that read or write these registers. Otherwise the compiler
// could change their order.
__device__ inline void warpgroup_fence_registers(float (&c)[64]) {
  UEFL_UNROLL
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Change the number of registers of each thread of a warpgroup. All four of its warps call them.
template <int kRegisters>
__device__ inline void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace
}  // namespace uefl::cuda
#endif

namespace uefl::cuda {
namespace {

// Arrives at a barrier for a warp, after all lanes have read the data behind the barrier.
__device__ inline void barrier_arrive_by_warp(Barrier* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
}

// An operand of a product. It lies in blocks of 8 rows x 128 bytes, one after the other. In row r of a block,
// the 16 bytes number i are at place i ^ r, which is the 128-byte swizzle. Each block begins at a multiple of
// 1024 bytes.
struct Operand {
  uint32_t low;  // the half with the address; the other half is the same for all operands

  __device__ operator uint64_t() const {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kRowsApart = uint64_t{1024 >> 4} << 32;
    return kSwizzle128 | kRowsApart | low;
  }
  __device__ Operand operator+(uint32_t places) const { return {low + places}; }
};
__device__ inline Operand operand(const void* first) {
  constexpr uint32_t kIgnored = 1 << 16;
  return {kIgnored | (shared_address(first) & 0x3ffff) >> 4};
}
constexpr uint32_t kOperandStep = 32 >> 4;  // step to the next 16 of the 64 elements in a row

}  // namespace
}  // namespace uefl::cuda
