// csrc/cuda/hopper.h on the CPU. Events happen as early or as late as the PTX manual allows, as drawn: a bulk
// copy happens at once or when a thread waits for its barrier, and a product when its group is committed or
// waited for. A kernel that reads too early, or releases memory too early, gets wrong numbers. A register of
// the left operand that changes before its products are done ends the test. Only the bits of the descriptor
// locate the right operand.
#pragma once

#include <algorithm>
#include <array>
#include <map>

#include "emulation_mma.h"

namespace emulation {

struct CountingBarrier {
  unsigned block = 0, arrivals = 0, missing = 0,
           parity = 0;  // the phase that is under way has this parity
  int64_t bytes = 0;
  std::vector<std::function<void()>> copies = {};
  Waiting waiting = {};

  void complete_phase() {
    if (missing > 0 || bytes != 0) return;
    missing = arrivals;
    parity ^= 1;
    wake(waiting);
  }
  void copy() {
    for (const auto& one : std::exchange(copies, {})) one();
    complete_phase();
  }
};
inline std::map<const void*, CountingBarrier> counting_barriers;
inline CountingBarrier& at(const void* barrier) {
  CountingBarrier& found = counting_barriers[barrier];
  if (found.block != blocks_run) refuse("a barrier that the block has not made");
  return found;
}

// Returns 16 bytes at i of row r of an operand of matrix descriptor bits, K-major (PTX manual, "Matrix
// Descriptor Format" and "Swizzling Modes").
inline std::array<uint16_t, 8> chunk_of(uint64_t bits, int r, int i) {
  const auto address = [&](int shift) { return static_cast<unsigned>(bits >> shift & 0x3fff) << 4; };
  const unsigned start = address(0), rows_apart = address(32), mode = static_cast<unsigned>(bits >> 62);
  static constexpr unsigned kRowBytes[] = {0, 128, 64, 32};
  if (mode == 0) refuse("a descriptor without swizzle: not written");
  if ((bits >> 49 & 7) != 0 || start % (8 * kRowBytes[mode]) >= kRowBytes[mode])
    refuse("a descriptor that does not begin in a first row");
  unsigned at = start + r / 8 * rows_apart + r % 8 * kRowBytes[mode] + i * 16;
  at ^= (at >> 7 & (kRowBytes[mode] / 16 - 1))
        << 4;  // the three address bits from 7 on; narrower modes use fewer
  if (at + 16 > sizeof shared) refuse("an operand beyond shared memory");
  std::array<uint16_t, 8> halves;
  std::memcpy(halves.data(), shared + at, 16);
  return halves;
}

using PendingProduct = std::function<void()>;
struct WarpgroupProducts {
  std::vector<PendingProduct> open;                   // not committed
  std::deque<std::vector<PendingProduct>> committed;  // not done

  void finish(size_t but) {
    for (; committed.size() > but; committed.pop_front()) {
      for (const PendingProduct& product : committed.front()) product();
    }
  }
};
inline std::map<unsigned, WarpgroupProducts> products;  // of each thread
inline WarpgroupProducts& own_products() { return products[threadIdx.x]; }

}  // namespace emulation

namespace uefl::cuda {
namespace {

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - emulation::shared);
}

template <class T>
T* kept_shared(T* pointer) {
  return pointer;
}

using Barrier = uint64_t;
inline void barrier_init(Barrier* barrier, unsigned arrivals) {
  for (const auto& [address, other] : emulation::counting_barriers) {
    if (other.block != emulation::blocks_run && !other.copies.empty())
      emulation::refuse("a block that ended before its copies had come");
  }
  emulation::counting_barriers[barrier] = {emulation::blocks_run, arrivals, arrivals};
}
inline void fence_barrier_init() {}
inline void barrier_arrive_expecting(Barrier* barrier, unsigned bytes) {
  emulation::CountingBarrier& found = emulation::at(barrier);
  if (found.missing == 0) emulation::refuse("more arrivals than the barrier counts");
  found.bytes += bytes;
  --found.missing;
  found.complete_phase();
}
inline void barrier_arrive(Barrier* barrier) { barrier_arrive_expecting(barrier, 0); }
inline bool barrier_over(Barrier* barrier, unsigned parity) {
  emulation::CountingBarrier& found = emulation::at(barrier);
  if (found.parity == parity && found.missing == 0) found.copy();
  if (found.parity == parity) emulation::poll();
  return found.parity != parity;
}
inline void barrier_wait(Barrier* barrier, unsigned parity) {
  emulation::CountingBarrier& found = emulation::at(barrier);
  while (found.parity == parity) {
    if (found.missing == 0) found.copy();
    if (found.parity == parity) emulation::wait_in(found.waiting);
  }
}

inline void fence_proxy_async() {}

inline void copy_bulk(void* target, const void* source, unsigned bytes, Barrier* barrier) {
  if (reinterpret_cast<uintptr_t>(source) % 16 || shared_address(target) % 16 || bytes % 16 || bytes == 0)
    emulation::refuse("a bulk copy that is not of whole 16 bytes");
  emulation::CountingBarrier& found = emulation::at(barrier);
  if (emulation::at_once()) std::memcpy(target, source, bytes);
  found.copies.push_back([=, &found] {
    std::memcpy(target, source, bytes);
    found.bytes -= bytes;
  });
  emulation::wake(found.waiting);
}

inline void warpgroup_arrive() {}
inline void warpgroup_commit() {
  emulation::WarpgroupProducts& own = emulation::own_products();
  own.committed.push_back(std::exchange(own.open, {}));
  if (emulation::at_once()) own.finish(0);
}
template <int kPending>
void warpgroup_wait() {
  emulation::own_products().finish(kPending);
  __syncwarp();
}

// Adds to the sums of this thread. left(row, k) is an element of row g (0) or g + 8 (1) of its warp.
template <class Left>
void add_products(float (&c)[64], uint64_t b, bool add, const Left& left) {
  const int t = static_cast<int>(threadIdx.x % 4);
  const auto place = [](int row, int i) { return i / 2 * 4 + row * 2 + i % 2; };
  float right[16][32], sums[2][32] = {};  // of the columns of this thread, adjacent for vectors
  for (int i = 0; i < 32; ++i) {
    for (int half = 0; half < 2; ++half) {
      const auto chunk = emulation::chunk_of(b, i / 2 * 8 + 2 * t + i % 2, half);
      for (int k = 0; k < 8; ++k) right[8 * half + k][i] = from_half(chunk[k]);
    }
  }
  for (int row = 0; row < 2; ++row) {
    for (int i = 0; i < 32 && add; ++i) sums[row][i] = c[place(row, i)];
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < 32; ++i) sums[row][i] += left[row][k] * right[k][i];
    }
    for (int i = 0; i < 32; ++i) c[place(row, i)] = sums[row][i];
  }
}

inline void multiply_group(float (&c)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  const TwoRows left =
      emulation::exchange(Operands{{a[0], a[1], a[2], a[3]}, {}}, [](auto at) { return two_rows(at); });
  const std::array<uint32_t, 4> given{a[0], a[1], a[2], a[3]};
  emulation::own_products().open.push_back([&c, &a, given, left, b, add] {
    if (!std::equal(given.begin(), given.end(), a))
      emulation::refuse("a left operand that changes before its products are done");
    add_products(c, b, add, left);
  });
}

inline void multiply_group(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  emulation::own_products().open.push_back([&c, a, b, add] {
    TwoRows left;
    for (int row = 0; row < 2; ++row) {
      const int of_group = static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) + 8 * row;
      for (int half = 0; half < 2; ++half) {
        const auto chunk = emulation::chunk_of(a, of_group, half);
        for (int k = 0; k < 8; ++k) left[row][8 * half + k] = from_half(chunk[k]);
      }
    }
    add_products(c, b, add, left);
  });
}

inline void warpgroup_fence_registers(float (&)[64]) {}
template <int kRegisters>
void warpgroup_reg_alloc() {}
template <int kRegisters>
void warpgroup_reg_dealloc() {}

}  // namespace
}  // namespace uefl::cuda
