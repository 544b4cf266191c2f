// Enough of CUDA to run a kernel header on the CPU: one std::thread per CUDA thread, blocks one after the other.
//
// A block's barrier is a std::barrier; __shared__ variables are static, which is right while one block runs at a time; a warp
// operation exchanges values through a table between two barriers of its 32 threads, which all must reach it, as the hardware
// demands of a full mask. It shows indexing, barriers and arithmetic right or wrong, and says nothing about speed.
#pragma once

#include <math.h>

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __noinline__
#define __grid_constant__

struct float4 {
  float x = 0, y = 0, z = 0, w = 0;
};
struct uint2 {
  unsigned x = 0, y = 0;
};
struct Dimension {
  unsigned x;
};
inline thread_local Dimension threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Warp {
  std::barrier<> barrier{32};
  uint64_t values[32];
};
inline std::barrier<>* block_barrier;
inline thread_local Warp* warp;
inline std::mutex atomic;

// Every thread of the warp gives a value; use(at) combines them, at(lane) being the value of that lane.
template <class T, class Use>
auto exchange(T value, const Use& use) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  std::memcpy(&warp->values[threadIdx.x % 32], &value, sizeof value);
  warp->barrier.arrive_and_wait();
  const auto result = use([](int lane) {
    T other;
    std::memcpy(&other, &warp->values[lane], sizeof other);
    return other;
  });
  warp->barrier.arrive_and_wait();
  return result;
}

// kernel<<<blocks, threads>>>(arguments...); threads is a multiple of 32.
template <class Kernel, class... Arguments>
void launch(unsigned blocks, unsigned threads, Kernel kernel, Arguments... arguments) {
  for (unsigned block = 0; block < blocks; ++block) {
    std::barrier<> barrier(threads);
    block_barrier = &barrier;
    std::vector<Warp> warps(threads / 32);
    std::vector<std::jthread> running;
    for (unsigned thread = 0; thread < threads; ++thread) {
      running.emplace_back([&, thread] {
        threadIdx = {thread}, blockIdx = {block}, blockDim = {threads}, gridDim = {blocks};
        warp = &warps[thread / 32];
        kernel(arguments...);
        warp->barrier.arrive_and_drop();
        barrier.arrive_and_drop();
      });
    }
  }
}

}  // namespace emulation

inline void __syncwarp() { emulation::warp->barrier.arrive_and_wait(); }
inline void __syncthreads() { emulation::block_barrier->arrive_and_wait(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange(value, [&](auto at) { return at(static_cast<int>(threadIdx.x % 32) ^ mask); });
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::exchange(value, [&](auto at) { return at(lane); });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulation::exchange(vote, [](auto at) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(at(lane)) << lane;
    return votes;
  });
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

// Built without contraction, plain operators round as these do.
inline float __fdividef(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline long long __double2ll_rn(double value) { return std::llrint(value); }
inline long long __double_as_longlong(double value) {
  long long bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline unsigned long long atomicAdd(unsigned long long* target, unsigned long long value) {
  const std::lock_guard lock(emulation::atomic);
  return std::exchange(*target, *target + value);
}
inline void atomicMax(unsigned long long* target, unsigned long long value) {
  const std::lock_guard lock(emulation::atomic);
  if (value > *target) *target = value;
}
