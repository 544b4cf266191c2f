// The instructions of a tensor-core phase, for sm_80 and later: asynchronous copies, loads of fragments from
// shared memory, and the product. tests/cpp/cuda/emulation_mma.h has the same functions for the CPU, written
// from the layouts in the PTX manual.
#pragma once

#if defined(__CUDACC__)
#include <cuda_fp16.h>

#include <cstdint>

namespace uefl::cuda {
namespace {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

extern __shared__ __align__(1024) unsigned char dynamic_shared[];  // 1024: for the swizzle of wgmma's
                                                                   // operands
__device__ inline unsigned char* dynamic_memory() { return dynamic_shared; }

// Returns the value, and hides it from the compiler. Otherwise the compiler keeps everything that it derives
// from the value in registers.
__device__ inline int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Wait or arrive at a named barrier for a number of threads. Some threads only arrive and do not wait.
__device__ inline void named_wait(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Starts to copy 16 bytes from global to shared memory. Without a source there, zeros are written.
__device__ inline void copy_async(void* target, const void* source, bool there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending groups of this thread are in flight.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Converts two numbers to float16, with the first one in the low half.
__device__ inline uint32_t to_halves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline uint16_t to_half(float value) { return __half_as_ushort(__float2half_rn(value)); }
__device__ inline float from_half(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

// Returns the square root of a normal number, to two units in the last place. It takes two instructions,
// while sqrtf() is a call.
__device__ inline float rough_root(float value) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}

__device__ inline int lesser(int a, int b) { return min(a, b); }
__device__ inline int greater(int a, int b) { return max(a, b); }
__device__ inline int least(int a, int b, int c) {
  return __vimin3_s32(a, b, c);
}  // one instruction from sm_90 on
__device__ inline int greatest(int a, int b, int c) { return __vimax3_s32(a, b, c); }
// Returns a * b + c. If the compiler knew that b is a power of two, it would use a shift with an addition,
// which runs on the pipe of the comparisons. The product runs on the floating-point pipe.
__device__ inline int multiply_add_integer(int a, int b, int c) {
  int sum;
  asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// Loads four 8 x 8 matrices of float16. Lane 8 i + r gives the address of row r of matrix i.
__device__ inline void load_matrices(uint32_t (&parts)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3])
               : "r"(shared_address(row))
               : "memory");
}

// Computes c [16, 8] += a [16, 16] b [16, 8], with float16 operands and float32 sums.
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace
}  // namespace uefl::cuda
#endif
