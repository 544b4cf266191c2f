// Two ways to find the two least of the scores of a thread, which has 32 columns of each of two rows. In lane
// t of a quad, score n of a row is column n / 2 * 8 + 2 t + n % 2. All scores of a launch have one exponent,
// so their bits have the order of integers.
#pragma once

#include "instructions.h"

namespace uefl::variants {
namespace {

// The two least packed scores.
struct LeastTwo {
  int best = 0x7fffffff, second = 0x7fffffff;

  __device__ void add(const LeastTwo& other) {
    second = least(second, other.second, greater(best, other.best));
    best = lesser(best, other.best);
  }
};

// The two least packed scores so far, and the tile of the least one.
struct KeptScores {
  LeastTwo two;
  int tile = 0;

  __device__ void add(const LeastTwo& other, int number) {
    tile = other.best < two.best ? number : tile;
    two.add(other);
  }
};

template <int kCount>
__device__ LeastTwo least_two_of(const int (&values)[kCount]) {
  LeastTwo pairs[kCount / 2];
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

// Packs each score with the number of its column, as search_wgmma does. Finds the least score of each of four
// rows of eight, and of each of eight columns of four. Another score is not in the row of the least score, or
// not in its column. So the second least score is the lesser of the second least row and the second least
// column.
struct Cross {
  static constexpr int kShift = 32;
  __device__ static LeastTwo run(const float (&scores)[32], int shift) {
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
    const LeastTwo of_rows = least_two_of(rows), of_columns = least_two_of(columns);
    LeastTwo found;
    found.best = of_rows.best, found.second = lesser(of_rows.second, of_columns.second);
    return found;
  }
};

// Finds the least of every group of columns, with the number of the group.
template <int kSize>
struct Groups {
  static constexpr int kShift = 32 / kSize;
  __device__ static LeastTwo run(const float (&scores)[32], int shift) {
    int packed[32 / kSize];
    UEFL_UNROLL
    for (int group = 0; group < 32 / kSize; ++group) {
      int some[kSize];
      UEFL_UNROLL
      for (int i = 0; i < kSize; ++i) some[i] = __float_as_int(scores[group * kSize + i]);
      packed[group] = multiply_add_integer(least_of(some), shift, group);
    }
    return least_two_of(packed);
  }
};

}  // namespace
}  // namespace uefl::variants
