// csrc/cuda/mma.h on the CPU, with the layouts of the PTX manual written out lane by lane. A copy happens at
// once, or when its group is waited for, as drawn.
#pragma once

#include <array>

#include "emulation.h"

namespace emulation {
// The dynamic shared memory of the running thread block. Addresses in it are offsets.
alignas(1024) inline unsigned char shared[256 * 1024];

struct Copies {
  using CopyGroup = std::vector<std::pair<void*, const void*>>;
  CopyGroup open;
  std::deque<CopyGroup> committed;
};
inline std::array<Copies, 1024> copies;  // of each thread
inline Copies& own_copies() { return copies[threadIdx.x]; }

// A named barrier for a number of threads of this thread block. Some of them do not wait.
struct NamedBarrier {
  unsigned block = 0;
  int arrived = 0;
  Waiting waiting = {};
};
inline std::array<NamedBarrier, 16> named_barriers;
inline void named(int name, int threads, bool wait) {
  NamedBarrier& found = named_barriers.at(name);
  if (name == 0 || threads % 32 != 0) refuse("a named barrier that __syncthreads has, or one of half a warp");
  if (found.block != blocks_run && found.arrived > 0)
    refuse("threads of another block have arrived at a named barrier");
  found.block = blocks_run;
  if (++found.arrived == threads) {
    found.arrived = 0;
    wake(found.waiting);
  } else if (wait) {
    wait_in(found.waiting);
  }
}

// The upper half of a float, rounded to nearest even.
struct Bfloat16 {
  uint16_t bits;

  Bfloat16() = default;
  explicit Bfloat16(double value) {
    const auto whole = static_cast<float>(value);
    const auto all = static_cast<uint32_t>(__float_as_int(whole));
    bits =
        static_cast<uint16_t>((std::isnan(whole) ? all | 0x400000u : all + 0x7fffu + (all >> 16 & 1)) >> 16);
  }
  operator float() const { return __int_as_float(static_cast<int>(uint32_t{bits} << 16)); }
};
}  // namespace emulation

namespace uefl::cuda {
namespace {

constexpr bool is_half(_Float16) { return true; }
constexpr bool is_half(emulation::Bfloat16) { return false; }
inline float widen(_Float16 value) { return static_cast<float>(value); }
inline void narrow(double value, _Float16& out) { out = static_cast<_Float16>(static_cast<float>(value)); }
inline float widen(emulation::Bfloat16 value) { return value; }
inline void narrow(double value, emulation::Bfloat16& out) { out = emulation::Bfloat16(value); }

inline int opaque(int value) { return value; }

inline void named_wait(int name, int threads) { emulation::named(name, threads, true); }
inline void named_arrive(int name, int threads) { emulation::named(name, threads, false); }

inline unsigned char* dynamic_memory() { return emulation::shared + 1024; }

inline void copy_async(void* target, const void* source, bool there = true) {
  static const __uint128_t zeros = 0;
  if (!there) source = &zeros;
  if (emulation::at_once()) std::memcpy(target, source, 16);
  emulation::own_copies().open.emplace_back(target, source);
}
inline void commit_copies() {
  emulation::Copies& own = emulation::own_copies();
  own.committed.push_back(std::exchange(own.open, {}));
}
template <int kPending>
void wait_copies() {
  auto& committed = emulation::own_copies().committed;
  for (; committed.size() > kPending; committed.pop_front()) {
    for (const auto& [target, source] : committed.front()) std::memcpy(target, source, 16);
  }
}

inline uint16_t to_half(float value) {
  const _Float16 narrow = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  return bits;
}
inline float from_half(uint16_t bits) {
  _Float16 narrow;
  std::memcpy(&narrow, &bits, sizeof bits);
  return static_cast<float>(narrow);
}
inline uint32_t to_halves(float low, float high) { return to_half(low) | uint32_t{to_half(high)} << 16; }

inline float rough_root(float value) { return std::sqrt(value) * (1 - 0x1p-22f); }

inline int lesser(int a, int b) { return a < b ? a : b; }
inline int greater(int a, int b) { return a < b ? b : a; }
inline int least(int a, int b, int c) { return lesser(lesser(a, b), c); }
inline int greatest(int a, int b, int c) { return greater(greater(a, b), c); }
inline int multiply_add_integer(int a, int b, int c) {
  return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b) + static_cast<unsigned>(c));
}

// Loads matrices. Part i of lane 4 r + c has elements 2 c and 2 c + 1 of row r of matrix i.
inline void load_matrices(uint32_t (&parts)[4], const void* row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  emulation::exchange(row, [&](auto at) {
    for (int i = 0; i < 4; ++i)
      std::memcpy(&parts[i], static_cast<const char*>(at(8 * i + lane / 4)) + 4 * (lane % 4), 4);
    return 0;
  });
  __syncwarp();  // all threads have read their operands
}

// The layouts of a product, with g = lane / 4 and t = lane % 4:
//   a: {row g, columns 2t..}, {row g + 8, 2t..}, {row g, 2t + 8..}, {row g + 8, 2t + 8..}
//   b: {rows 2t.., column g}, {rows 2t + 8.., g}
//   c: {row g, columns 2t, 2t + 1}, {row g + 8, the same}
using TwoRows = std::array<std::array<float, 16>, 2>;
// Writes elements 2t, 2t + 1, 2t + 8 and 2t + 9 of a row or column.
inline void put(std::array<float, 16>& values, int t, uint32_t low, uint32_t high) {
  values[2 * t] = from_half(static_cast<uint16_t>(low)), values[2 * t + 1] = from_half(low >> 16);
  values[2 * t + 8] = from_half(static_cast<uint16_t>(high)), values[2 * t + 9] = from_half(high >> 16);
}
struct Operands {
  uint32_t a[4], b[2];
};
// Returns rows g and g + 8 for the calling lane.
template <class At>
TwoRows two_rows(const At& at) {
  TwoRows rows;
  const int g = static_cast<int>(threadIdx.x % 32) / 4;
  for (int t = 0; t < 4; ++t) {
    const Operands other = at(4 * g + t);
    for (int r = 0; r < 2; ++r) put(rows[r], t, other.a[r], other.a[r + 2]);
  }
  return rows;
}

inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto at) {
    const TwoRows left = two_rows(at);
    TwoRows right;
    for (int column = 0; column < 2; ++column) {
      for (int t = 0; t < 4; ++t) {
        const Operands other = at(4 * (2 * static_cast<int>(threadIdx.x % 4) + column) + t);
        put(right[column], t, other.b[0], other.b[1]);
      }
    }
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 16; ++j) c[i] += left[i / 2][j] * right[i % 2][j];
    }
    return 0;
  });
}

}  // namespace
}  // namespace uefl::cuda
