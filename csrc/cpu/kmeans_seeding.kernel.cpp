// The distances of the k-means seeding on vectors. AMX has its own kernel, kmeans.amx.cpp.
#include "cpu/kmeans_seeding_kernel.h"
#include "cpu/simd.h"
#include "cpu/variant.h"

namespace uefl::cpu {
namespace {

// Rows are in panels, with one lane per row: [pairs of elements][kPanel rows][2]. A group is [pairs][kGroup
// candidates][2].
constexpr int kVectors = 2, kPanel = kVectors * kLanes;

inline int64_t pairs_of_row(int64_t d) { return (d + 1) / 2; }
int64_t row_bytes(int64_t d) { return pairs_of_row(d) * 4; }
int64_t group_bytes(int64_t d) { return (pairs_of_row(d) * 4 * kGroup + 63) / 64 * 64; }

inline int64_t place_of(int64_t row, int64_t d, int64_t j) {
  return (row / kPanel * pairs_of_row(d) + j / 2) * 2 * kPanel + row % kPanel * 2 + j % 2;
}

void store(const int16_t* values, int64_t d, int64_t row, char* rows) {
  int16_t* target = reinterpret_cast<int16_t*>(rows) + place_of(row, d, 0);
  for (int64_t j = 0; j + 2 <= d; j += 2, target += 2 * kPanel) __builtin_memcpy(target, values + j, 4);
  if (d % 2) target[0] = values[d - 1], target[1] = 0;
}

void load(const char* rows, int64_t d, int64_t row, int16_t* values) {
  for (int64_t j = 0; j < d; ++j) values[j] = reinterpret_cast<const int16_t*>(rows)[place_of(row, d, j)];
}

void pack(const int16_t* values, int64_t d, int64_t place, char* group) {
  int16_t* target = reinterpret_cast<int16_t*>(group) + 2 * place;
  for (int64_t j = 0; j < d; ++j) target[j / 2 * 2 * kGroup + j % 2] = values[j];
}

// Adds the numbers of a vector of 32 bits to the sums.
UEFL_INLINE void add_wide(const Ints& numbers, SignedLongs (&sums)[2]) {
  typedef int32_t Half __attribute__((vector_size(2 * kLanes)));
  Half half[2];
  __builtin_memcpy(half, &numbers, sizeof half);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) sums[i] += __builtin_convertvector(half[i], SignedLongs);
}

// Computes the products of kCount candidates with the rows of a panel. It sums them in 32 bits as long as
// they fit, then in 64 bits.
template <int kCount>
void multiply(const char* panel, const char* group, int64_t pairs, int64_t run, int64_t (*products)[kPanel]) {
  SignedLongs wide[kCount][kVectors][2] = {};
  const Ints* rows = reinterpret_cast<const Ints*>(panel);
  for (int64_t start = 0; start < pairs; start += run) {
    const int64_t end = start + run < pairs ? start + run : pairs;
    Ints sum[kCount][kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kCount; ++c) sum[c][0] = sum[c][1] = Ints{};
    for (int64_t j = start; j < end; ++j, rows += kVectors) {
      const Ints first = rows[0], second = rows[1];
#pragma GCC unroll 8
      for (int c = 0; c < kCount; ++c) {
        int32_t pair;
        __builtin_memcpy(&pair, group + (j * kGroup + c) * 4, sizeof pair);
        add_pair_products(broadcast(pair), first, sum[c][0]);
        add_pair_products(broadcast(pair), second, sum[c][1]);
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < kCount; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) add_wide(sum[c][v], wide[c][v]);
    }
  }
  __builtin_memcpy(products, wide, sizeof wide);
}

template <int kCount>
void distances_to(const char* rows, const int64_t* norms, int64_t first, int64_t count, int64_t d,
                  int64_t run, const char* group, const int64_t* group_norms, int64_t* const* out) {
  const int64_t pairs = pairs_of_row(d);
  alignas(64) int64_t products[kCount][kPanel];
  for (int64_t start = 0; start < count; start += kPanel) {
    multiply<kCount>(rows + (first + start) * row_bytes(d), group, pairs, run < 2 ? 1 : run / 2, products);
    const int64_t n = count - start < kPanel ? count - start : kPanel;
    for (int c = 0; c < kCount; ++c) {
      for (int64_t i = 0; i < n; ++i)
        out[c][start + i] = norms[first + start + i] + group_norms[c] - 2 * products[c][i];
    }
  }
}

void distances(const char* rows, const int64_t* norms, int64_t first, int64_t count, int64_t d, int64_t run,
               const char* group, const int64_t* group_norms, int64_t candidates, int64_t* const* out) {
  // The largest number of candidates with sums that fit into the registers.
  constexpr int kMost = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 4;
  while (candidates > 0) {
    const int64_t passes = (candidates + kMost - 1) / kMost, now = (candidates + passes - 1) / passes;
    decltype(&distances_to<1>)
        const functions[] = {distances_to<1>, distances_to<2>, distances_to<3>, distances_to<4>,
                             distances_to<5>, distances_to<6>, distances_to<7>, distances_to<8>};
    functions[now - 1](rows, norms, first, count, d, run, group, group_norms, out);
    group += now * 4, group_norms += now, out += now, candidates -= now;
  }
}

}  // namespace

const SeedingKernel UEFL_VARIANT(seeding){row_bytes, group_bytes, store, load, pack, distances};

}  // namespace uefl::cpu
