// Evaluates the definition of the search for every codeword, without scores. Each instruction set implements
// this interface.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

constexpr int64_t kDirectRows = 48;   // rows of a call: groups of every instruction set fill it
constexpr int64_t kDirectGroup = 16;  // rows of the largest group

struct DirectRun {
  const char* const* rows;  // [count], each contiguous
  int64_t count;            // at most kDirectRows
  Dtype dtype;
  const double* codewords;  // [k, d]
  int64_t k, d;
  bool euclidean;
  double* values;  // workspace for [k][kDirectGroup]
};

struct VqAssignDirectKernel {
  // Writes the nearest codeword of each row. Ties go to the lowest index, and a row with a NaN gets 0.
  // Returns false if a distance is not finite.
  bool (*nearest)(const DirectRun& run, int64_t* index);
};

extern const VqAssignDirectKernel vq_assign_direct_portable, vq_assign_direct_avx2, vq_assign_direct_avx512;

}  // namespace uefl::cpu
