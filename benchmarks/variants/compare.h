// Ways to reduce 64 scores of a thread for a search: 32 columns of each of two rows. In lane t of a quad,
// score n of a row is column n / 2 * 8 + 2 t + n % 2. All scores of a launch have one exponent, so their bits
// have the order of integers.
#pragma once

#include "instructions.h"

namespace uefl::variants {
namespace {

struct Two {
  int best = 0x7fffffff, second = 0x7fffffff;

  __device__ void add(const Two& other) {
    second = least(second, other.second, greater(best, other.best));
    best = lesser(best, other.best);
  }
};

struct Kept {
  Two two;
  int tile = 0;

  __device__ void add(const Two& other, int number) {
    tile = other.best < two.best ? number : tile;
    two.add(other);
  }
};

template <int kCount>
__device__ Two two_of(const int (&values)[kCount]) {
  Two pairs[kCount / 2];
  UEFL_UNROLL
  for (int i = 0; i < kCount / 2; ++i) {
    pairs[i].best = lesser(values[2 * i], values[2 * i + 1]),
    pairs[i].second = greater(values[2 * i], values[2 * i + 1]);
  }
  UEFL_UNROLL
  for (int step = 1; step < kCount / 2; step *= 2) {
    UEFL_UNROLL
    for (int i = 0; i < kCount / 2; i += 2 * step) pairs[i].add(pairs[i + step]);
  }
  return pairs[0];
}

template <int kCount>
__device__ int least_of(const int (&values)[kCount]) {
  int found = values[0];
  UEFL_UNROLL
  for (int i = 1; i + 1 < kCount; i += 2) found = least(found, values[i], values[i + 1]);
  return kCount % 2 == 0 ? lesser(found, values[kCount - 1]) : found;
}

// Every score has its number, as in the kernel today. It finds the least of four groups of eight, and of
// eight groups of four across them. The second score of the row is the lesser of both seconds, since the
// least score shares at most one of these groups with another score.
struct Cross {
  static constexpr int kShift = 32;
  __device__ static Two run(const float (&scores)[32], int shift) {
    int packed[32], rows[4], columns[8];
    UEFL_UNROLL
    for (int i = 0; i < 32; ++i) packed[i] = multiply_add_integer(__float_as_int(scores[i]), shift, i);
    UEFL_UNROLL
    for (int row = 0; row < 4; ++row) {
      int some[8];
      UEFL_UNROLL
      for (int i = 0; i < 8; ++i) some[i] = packed[8 * row + i];
      rows[row] = least_of(some);
    }
    UEFL_UNROLL
    for (int column = 0; column < 8; ++column) {
      int some[4];
      UEFL_UNROLL
      for (int i = 0; i < 4; ++i) some[i] = packed[8 * i + column];
      columns[column] = least_of(some);
    }
    const Two of_rows = two_of(rows), of_columns = two_of(columns);
    Two found;
    found.best = of_rows.best, found.second = lesser(of_rows.second, of_columns.second);
    return found;
  }
};

// Finds the least of every group of columns, with the number of the group.
template <int kSize>
struct Groups {
  static constexpr int kShift = 32 / kSize;
  __device__ static Two run(const float (&scores)[32], int shift) {
    int packed[32 / kSize];
    UEFL_UNROLL
    for (int group = 0; group < 32 / kSize; ++group) {
      int some[kSize];
      UEFL_UNROLL
      for (int i = 0; i < kSize; ++i) some[i] = __float_as_int(scores[group * kSize + i]);
      packed[group] = multiply_add_integer(least_of(some), shift, group);
    }
    return two_of(packed);
  }
};

}  // namespace
}  // namespace uefl::variants
