// The inner loops of the seeding of k-means: distances between rows of whole numbers, exact.
#pragma once

#include <cstdint>

namespace uefl::cpu {

constexpr int64_t kGroup = 8;  // candidates that are compared with a row at once

// Squared distances of rows of whole numbers, of magnitudes up to 32,639, to groups of candidates.
struct SeedingKernel {
  int64_t (*row_bytes)(int64_t d);    // memory of a row, of which there must be a multiple of 32
  int64_t (*group_bytes)(int64_t d);  // and of a group
  void (*store)(const int16_t* values, int64_t d, int64_t row, char* rows);
  void (*load)(const char* rows, int64_t d, int64_t row, int16_t* values);
  // Puts a row into its place in a group, which was zero.
  void (*pack)(const int16_t* values, int64_t d, int64_t place, char* group);
  // out[c][0 .. count): distances of the rows from `first` on, a multiple of 32, to the first candidates of a
  // group, given the squared norms of the rows and of the group. run: elements, a power of two, whose squares
  // add up to less than 2^31 in every row, from a multiple of run on.
  void (*distances)(const char* rows, const int64_t* norms, int64_t first, int64_t count, int64_t d,
                    int64_t run, const char* group, const int64_t* group_norms, int64_t candidates,
                    int64_t* const* out);
};

extern const SeedingKernel seeding_portable, seeding_avx2, seeding_avx512, seeding_avx512vnni, seeding_amx;

}  // namespace uefl::cpu
