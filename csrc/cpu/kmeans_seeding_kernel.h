// The inner loops of the k-means seeding: exact distances between integer rows.
#pragma once

#include <cstdint>

namespace uefl::cpu {

constexpr int64_t kGroup = 8;  // candidates that are compared with a row at once

// Computes squared distances of integer rows, with magnitudes up to 32,639, to groups of candidates.
struct SeedingKernel {
  int64_t (*row_bytes)(int64_t d);    // memory of a row; call with multiples of 32 rows
  int64_t (*group_bytes)(int64_t d);  // memory of a group
  void (*store)(const int16_t* values, int64_t d, int64_t row, char* rows);
  void (*load)(const char* rows, int64_t d, int64_t row, int16_t* values);
  // Writes a row into its place in a zeroed group.
  void (*pack)(const int16_t* values, int64_t d, int64_t place, char* group);
  // Writes to out[c][0 .. count) the distances of the rows from `first` on, a multiple of 32, to the
  // candidates of a group. The squared norms of the rows and of the group are given. `run` is a power of two.
  // In every row, the squares of `run` elements, from a multiple of `run` on, sum to less than 2^31.
  void (*distances)(const char* rows, const int64_t* norms, int64_t first, int64_t count, int64_t d,
                    int64_t run, const char* group, const int64_t* group_norms, int64_t candidates,
                    int64_t* const* out);
};

extern const SeedingKernel seeding_portable, seeding_avx2, seeding_avx512, seeding_avx512vnni, seeding_amx;

}  // namespace uefl::cpu
