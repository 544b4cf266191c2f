// csrc/cuda/hopper.h on the CPU, as late as the PTX manual allows: a bulk copy happens when somebody waits for the barrier that it
// reports to, a product when its group is waited for. What reads before it has waited, or hands memory back before what reads it is done,
// gets wrong numbers. Operands are found from the bits of their descriptors alone. Not seen: a store that show_stores() leaves out.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "emulation_mma.h"

namespace emulation {

struct CountingBarrier {
  std::mutex mutex;
  std::condition_variable over;
  unsigned arrivals, missing, parity = 0;  // of the phase that is under way
  int64_t bytes = 0;
  std::vector<std::function<void()>> copies;

  explicit CountingBarrier(unsigned count) : arrivals(count), missing(count) {}

  // The caller holds the mutex.
  void settle() {
    if (missing > 0 || bytes != 0) return;
    missing = arrivals;
    parity ^= 1;
    over.notify_all();
  }
  void copy() {
    for (const auto& one : std::exchange(copies, {})) one();
    settle();
  }
};
inline std::map<const void*, std::unique_ptr<CountingBarrier>> counting_barriers;
inline std::mutex counting_barriers_mutex;

inline CountingBarrier& at(const void* barrier) {
  const std::lock_guard lock(counting_barriers_mutex);
  return *counting_barriers.at(barrier);
}

[[noreturn]] inline void refuse(const char* why) {
  std::printf("emulation: %s\n", why);
  std::fflush(stdout);
  std::abort();
}

// 16 bytes at i of row r of an operand of matrix descriptor bits, K-major (PTX manual, "Matrix Descriptor Format" and "Swizzling Modes").
inline std::array<uint16_t, 8> chunk_of(uint64_t bits, int r, int i) {
  const auto address = [&](int shift) { return static_cast<unsigned>(bits >> shift & 0x3fff) << 4; };
  const unsigned start = address(0), rows_apart = address(32), mode = static_cast<unsigned>(bits >> 62);
  static constexpr unsigned kRowBytes[] = {0, 128, 64, 32};
  if (mode == 0) refuse("a descriptor without swizzle: not written");
  if ((bits >> 49 & 7) != 0 || start % (8 * kRowBytes[mode]) >= kRowBytes[mode]) refuse("a descriptor that does not begin in a first row");
  unsigned at = start + r / 8 * rows_apart + r % 8 * kRowBytes[mode] + i * 16;
  at ^= (at >> 7 & (kRowBytes[mode] / 16 - 1)) << 4;  // the three address bits from 7 on, of which narrower modes use fewer
  if (at + 16 > sizeof shared) refuse("an operand beyond shared memory");
  std::array<uint16_t, 8> halves;
  std::memcpy(halves.data(), shared + at, 16);
  return halves;
}

inline float half_value(uint16_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) values[i] = uefl::cuda::from_half(static_cast<uint16_t>(i));
    return values;
  }();
  return table[bits];
}

using Product = std::function<void()>;
inline thread_local std::vector<Product> products;               // not committed
inline thread_local std::deque<std::vector<Product>> committed;  // not waited for
inline std::barrier<>* group_barriers[3];

// kernel<<<blocks, threads, shared memory>>> of a kernel whose first two warpgroups meet by themselves.
template <class Kernel, class... Arguments>
void launch_groups(unsigned blocks, unsigned threads, Kernel kernel, Arguments... arguments) {
  for (unsigned block = 0; block < blocks; ++block) {
    std::barrier<> first(128), second(128);
    group_barriers[1] = &first, group_barriers[2] = &second;
    counting_barriers.clear();
    const auto one = [&](auto... given) {
      blockIdx = {block}, gridDim = {blocks};
      kernel(given...);
    };
    launch(1, threads, one, arguments...);
  }
}

}  // namespace emulation

namespace uefl::cuda {
namespace {

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - emulation::shared);
}

using Barrier = uint64_t;
inline void barrier_init(Barrier* barrier, unsigned arrivals) {
  const std::lock_guard lock(emulation::counting_barriers_mutex);
  emulation::counting_barriers[barrier] = std::make_unique<emulation::CountingBarrier>(arrivals);
}
inline void barriers_are_there() {}
inline void barrier_arrive_expecting(Barrier* barrier, unsigned bytes) {
  emulation::CountingBarrier& found = emulation::at(barrier);
  const std::lock_guard lock(found.mutex);
  if (found.missing == 0) emulation::refuse("more arrivals than the barrier counts");
  found.bytes += bytes;
  --found.missing;
  found.settle();
}
inline void barrier_arrive(Barrier* barrier) { barrier_arrive_expecting(barrier, 0); }
inline void barrier_wait(Barrier* barrier, unsigned parity) {
  emulation::CountingBarrier& found = emulation::at(barrier);
  std::unique_lock lock(found.mutex);
  found.over.wait(lock, [&] {
    if (found.parity == parity && found.missing == 0) found.copy();
    return found.parity != parity;
  });
}

inline void copy_bulk(void* target, const void* source, unsigned bytes, Barrier* barrier) {
  if (reinterpret_cast<uintptr_t>(source) % 16 || shared_address(target) % 16 || bytes % 16 || bytes == 0) {
    emulation::refuse("a bulk copy that is not of whole 16 bytes");
  }
  emulation::CountingBarrier& found = emulation::at(barrier);
  const std::lock_guard lock(found.mutex);
  found.copies.push_back([=, &found] {
    std::memcpy(target, source, bytes);
    found.bytes -= bytes;
  });
  found.over.notify_all();
}

inline void show_stores() {}
inline void group_sync(int number) { emulation::group_barriers[number]->arrive_and_wait(); }

inline void products_begin() {}
inline void products_commit() { emulation::committed.push_back(std::exchange(emulation::products, {})); }
template <int kPending>
void products_wait() {
  while (emulation::committed.size() > kPending) {
    for (const emulation::Product& product : emulation::committed.front()) product();
    emulation::committed.pop_front();
  }
  __syncwarp();
}

inline void multiply_group(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  const int warp = static_cast<int>(threadIdx.x % 128 / 32), g = static_cast<int>(threadIdx.x % 32 / 4),
            t = static_cast<int>(threadIdx.x % 4);
  emulation::products.push_back([&c, a, b, add, warp, g, t] {
    for (int row = 0; row < 2; ++row) {
      for (int i = 0; i < 32; ++i) {
        float& sum = c[i / 2 * 4 + row * 2 + i % 2];
        if (!add) sum = 0;
        for (int half = 0; half < 2; ++half) {
          const auto left = emulation::chunk_of(a, 16 * warp + g + 8 * row, half),
                     right = emulation::chunk_of(b, i / 2 * 8 + 2 * t + i % 2, half);
          for (int k = 0; k < 8; ++k) sum += emulation::half_value(left[k]) * emulation::half_value(right[k]);
        }
      }
    }
  });
}

}  // namespace
}  // namespace uefl::cuda
