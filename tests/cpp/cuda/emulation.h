// Enough of CUDA to run a kernel header on the CPU. Every CUDA thread has its own stack, one thread of the
// CPU runs them in turn, and thread blocks run one after the other.
//
// A thread runs until it waits. Then the thread that was woken last runs, so a warp gets far ahead of the
// others. Now and then another thread is drawn. So a missing barrier gives wrong numbers, the same ones in
// every run. If no thread may continue, the kernel hangs, and the test fails. __shared__ variables are
// static, which is correct while one thread block runs at a time. A warp operation exchanges values through a
// table and a barrier of its 32 threads. All of them must reach it, as the hardware demands for a full mask.
// The emulation checks indexing, barriers and arithmetic, but not speed.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <type_traits>
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
struct float2 {
  float x = 0, y = 0;
};
struct uint2 {
  unsigned x = 0, y = 0;
};
struct uint4 {
  unsigned x = 0, y = 0, z = 0, w = 0;
};
struct Dimension {
  unsigned x;
};
inline Dimension threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

[[noreturn]] inline void refuse(const char* why) {
  std::printf("emulation: %s\n", why);
  std::fflush(stdout);
  std::abort();
}

struct Thread;
using Waiting = std::vector<Thread*>;

// A barrier of the emulation. A phase is over when all expected threads have arrived.
struct ThreadBarrier {
  int expected, missing;
  unsigned phase = 0;
  Waiting waiting = {};

  explicit ThreadBarrier(unsigned threads) : expected(static_cast<int>(threads)), missing(expected) {}
  void arrive_and_wait();
  void arrive_and_drop();

 private:
  bool last();
};

struct Warp {
  static constexpr size_t kMost = 32;  // bytes of a value
  ThreadBarrier barrier{32};
  unsigned char values[2][32][kMost];  // of this phase of the barrier and of the one before it, which some
                                       // lanes may still read
};

struct Block {
  unsigned number;  // in the grid
  ThreadBarrier barrier;
  std::vector<Warp> warps;

  Block(unsigned of_grid, unsigned threads) : number(of_grid), barrier(threads), warps(threads / 32) {}
};

// A thread, or its launcher, while it waits. A context first switches to the thread's own stack. Later a jump
// does this, which makes no system call.
struct Place {
  ucontext_t context;
  bool begun = true;
  jmp_buf at;

  [[noreturn]] void go_on() {
    if (begun) _longjmp(at, 1);
    begun = true;
    setcontext(&context);
    std::abort();
  }
  void leave_for(Place& other) {
    if (_setjmp(at) == 0) other.go_on();
  }
};

struct Thread {
  static constexpr size_t kStack = 256 * 1024;
  Place place;
  std::unique_ptr<char[]> stack{new char[kStack]};
  unsigned index;
  Warp* warp;
  Block* block;
};
inline std::deque<Thread> threads;  // kept from launch to launch
inline Thread* running;
inline Waiting ready;
inline std::minstd_rand draw;
// Decides about an event that may happen at any time until it is waited for.
inline bool at_once() { return draw() % 2 == 0; }
inline Place launcher;
inline Block* block;  // the thread block of the running thread
inline unsigned blocks_run = 0, launches = 0;
inline std::function<void()> body;
inline bool cooperative = false;
inline Waiting at_grid_barrier;  // threads of the running thread block

inline unsigned polls = 0;  // since a thread was woken

inline void wake(Waiting& waiting) {
  if (!waiting.empty()) polls = 0;
  ready.insert(ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

// Returns the next thread to run, or the launcher if all threads of a thread block wait for the other thread
// blocks.
inline Place& next() {
  if (ready.empty() && !at_grid_barrier.empty() &&
      at_grid_barrier.size() == static_cast<size_t>(block->barrier.expected))
    return launcher;
  if (ready.empty()) refuse("every thread waits: the kernel hangs");
  if (draw() % 64 == 0) std::swap(ready[draw() % ready.size()], ready.back());
  running = ready.back();
  ready.pop_back();
  block = running->block;
  threadIdx = {running->index}, blockIdx = {block->number};
  return running->place;
}
// Waits until wake() of this list.
inline void wait_in(Waiting& waiting) {
  Thread* self = running;
  waiting.push_back(self);
  if (Place& other = next(); &other != &self->place) self->place.leave_for(other);
}

// Lets other threads run before this one, which polls.
inline void poll() {
  if (++polls > 10'000'000) refuse("every thread waits or polls: the kernel hangs");
  ready.insert(ready.begin(), running);
  Thread* self = running;
  if (Place& other = next(); &other != &self->place) self->place.leave_for(other);
}

inline bool ThreadBarrier::last() {
  if (--missing > 0) return false;
  missing = expected;
  ++phase;
  wake(waiting);
  return true;
}
inline void ThreadBarrier::arrive_and_wait() {
  if (!last()) wait_in(waiting);
}
inline void ThreadBarrier::arrive_and_drop() {
  --expected;
  last();
}

// Exchanges values in a warp. Every thread of the warp gives a value, and use(at) combines them, where
// at(lane) is the value of that lane. Other threads may continue meanwhile.
template <class T, class Use>
auto exchange(T value, const Use& use) {
  static_assert(sizeof(T) <= Warp::kMost);
  Warp& warp = *running->warp;
  auto* values = warp.values[warp.barrier.phase % 2];
  std::memcpy(values[threadIdx.x % 32], &value, sizeof value);
  warp.barrier.arrive_and_wait();
  return use([values](int lane) {
    T other;
    std::memcpy(&other, values[lane], sizeof other);
    return other;
  });
}

inline void run_body() {
  body();
  running->warp->barrier.arrive_and_drop();
  block->barrier.arrive_and_drop();
  (ready.empty() && block->barrier.expected == 0 ? launcher : next()).go_on();
}

inline void begin(Thread& thread) {
  ucontext_t& context = thread.place.context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get(), context.uc_stack.ss_size = Thread::kStack;
  makecontext(&context, run_body, 0);
  thread.place.begun = false;
  ready.push_back(&thread);
}

// Starts the threads of a thread block, beginning with thread number `first`.
inline void begin(Block& own, unsigned first) {
  for (unsigned index = 0; index < own.warps.size() * 32; ++index) {
    Thread& thread = threads[first + index];
    thread.index = index, thread.warp = &own.warps[index / 32], thread.block = &own;
    begin(thread);
  }
}

// Runs kernel<<<blocks, count>>>(arguments...). count is a multiple of 32.
template <class Kernel, class... Arguments>
void launch(unsigned blocks, unsigned count, Kernel kernel, Arguments... arguments) {
  while (threads.size() < count) threads.emplace_back();
  body = [&] { kernel(arguments...); };
  blockDim = {count}, gridDim = {blocks}, ++launches;
  for (unsigned number = 0; number < blocks; ++number) {
    Block own(number, count);
    ++blocks_run;
    begin(own, 0);
    launcher.leave_for(next());
  }
}

// Runs a kernel with all thread blocks present at once. One thread block runs up to a barrier of the grid,
// then the next one does. Since all thread blocks share the __shared__ variables here, their contents are
// lost at that barrier.
template <class Kernel, class... Arguments>
void launch_cooperative(unsigned blocks, unsigned count, Kernel kernel, Arguments... arguments) {
  struct LaunchedBlock {
    Block block;
    Waiting waiting = {};
  };
  while (threads.size() < blocks * count) threads.emplace_back();
  body = [&] { kernel(arguments...); };
  blockDim = {count}, gridDim = {blocks}, cooperative = true, ++launches;
  std::deque<LaunchedBlock> all;
  for (unsigned number = 0; number < blocks; ++number, ++blocks_run) {
    LaunchedBlock& own = all.emplace_back(LaunchedBlock{Block(number, count)});
    begin(own.block, number * count);
    own.waiting.swap(ready);
  }
  for (bool left = true; left;) {
    left = false;
    for (LaunchedBlock& own : all) {
      if (own.waiting.empty()) continue;
      ready.swap(own.waiting);
      launcher.leave_for(next());
      own.waiting.swap(at_grid_barrier);
      left = left || !own.waiting.empty();
    }
  }
  cooperative = false;
}

}  // namespace emulation

inline void __syncwarp() { emulation::running->warp->barrier.arrive_and_wait(); }
inline void __syncthreads() { emulation::block->barrier.arrive_and_wait(); }

namespace uefl::cuda {
namespace {
inline void grid_barrier() {
  if (!emulation::cooperative) emulation::refuse("a barrier of the grid in a launch that is not cooperative");
  emulation::wait_in(emulation::at_grid_barrier);
}
}  // namespace
}  // namespace uefl::cuda

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
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
template <class T>
unsigned __match_any_sync(unsigned, T value) {
  return emulation::exchange(value, [value](auto at) {
    unsigned same = 0;
    for (int lane = 0; lane < 32; ++lane) same |= static_cast<unsigned>(at(lane) == value) << lane;
    return same;
  });
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

// The build has no contraction, so plain operators round as these functions do.
inline float __fdividef(float a, float b) { return a / b; }
#define __expf expf  // the C library has this name, too
#define __logf logf
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __longlong_as_double(long long bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline long long __double2ll_rn(double value) { return std::llrint(value); }
inline long long __double_as_longlong(double value) {
  long long bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline void __nanosleep(unsigned) {}
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
inline void __threadfence() {}
template <class T>
T __ldcg(const T* value) {
  return *value;
}
template <class T>
void __stcs(T* target, T value) {
  *target = value;
}
template <class T>
T atomicAdd(T* target, std::type_identity_t<T> value) {
  return std::exchange(*target, *target + value);
}
inline int atomicAdd(int* target, int value) { return std::exchange(*target, *target + value); }
inline void atomicMax(unsigned long long* target, unsigned long long value) {
  if (value > *target) *target = value;
}
