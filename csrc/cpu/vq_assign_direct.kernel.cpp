// Evaluates the definition for every codeword, with the rows in the lanes. Terms are rounded and added in the
// order of the elements. This file is compiled without contraction, because a fused multiply-add would round
// differently.
#include "cpu/simd.h"
#include "cpu/variant.h"
#include "cpu/vq_assign_direct_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int kVectors = 2, kRows = kVectors * kDoubles;  // rows of a group
constexpr int kCodewords = 4;   // codewords of a step: their sums with a group fill the registers
constexpr int64_t kSlab = 128;  // elements of a group; they stay in the first-level cache

// Loads element j of kDoubles rows.
template <class T>
UEFL_INLINE void gather(const T* const* rows, int64_t j, Doubles& out) {
  if constexpr (sizeof(T) == sizeof(double)) {
#pragma GCC unroll 8
    for (int lane = 0; lane < kDoubles; ++lane) out[lane] = rows[lane][j];
  } else {
    HalfFloats narrow;
#pragma GCC unroll 8
    for (int lane = 0; lane < kDoubles; ++lane) narrow[lane] = widen(rows[lane][j]);
    out = __builtin_convertvector(narrow, Doubles);
  }
}

// Adds the terms of the first `count` elements of a group to the sums with kCount codewords, which are d
// elements apart.
template <bool kEuclidean, int kCount>
UEFL_INLINE void add_terms(const Doubles (*x)[kVectors], int64_t count, const double* codewords, int64_t d,
                           Doubles (&sum)[kCount][kVectors]) {
  for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) {
      const Doubles code = Doubles{} + codewords[c * d + j];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kEuclidean) {
          const Doubles difference = x[j][v] - code;
          sum[c][v] += difference * difference;
        } else {
          sum[c][v] -= x[j][v] * code;
        }
      }
    }
  }
}

struct GroupNearest {
  Doubles value[kVectors];
  SignedLongs index[kVectors];
};

// Continues the sums of kCount codewords over elements [from, from + count). The last elements complete the
// sums.
template <bool kEuclidean, int kCount>
UEFL_INLINE void step(const DirectRun& run, const Doubles (*x)[kVectors], int64_t from, int64_t count,
                      int64_t code, GroupNearest& nearest) {
  Doubles sum[kCount][kVectors] = {};
  double* const values = run.values + code * kRows;
  if (from > 0) __builtin_memcpy(sum, values, sizeof sum);
  add_terms<kEuclidean, kCount>(x, count, run.codewords + code * run.d + from, run.d, sum);
  if (from + count < run.d) {
    __builtin_memcpy(values, sum, sizeof sum);
    return;
  }
#pragma GCC unroll 4
  for (int c = 0; c < kCount; ++c) {
    const SignedLongs number = SignedLongs{} + (code + c);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const auto less = sum[c][v] < nearest.value[v];
      nearest.value[v] = less ? sum[c][v] : nearest.value[v];
      nearest.index[v] = less ? number : nearest.index[v];
    }
  }
}

template <class T, bool kEuclidean>
void search_group(const DirectRun& run, const T* const* rows, GroupNearest& nearest) {
  Doubles x[kSlab][kVectors];
  for (int64_t from = 0; from < run.d; from += kSlab) {
    const int64_t count = run.d - from < kSlab ? run.d - from : kSlab;
    for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) gather(rows + v * kDoubles, from + j, x[j][v]);
    }
    int64_t code = 0;
    for (; code + kCodewords <= run.k; code += kCodewords)
      step<kEuclidean, kCodewords>(run, x, from, count, code, nearest);
    if (run.k - code == 3) step<kEuclidean, 3>(run, x, from, count, code, nearest);
    if (run.k - code == 2) step<kEuclidean, 2>(run, x, from, count, code, nearest);
    if (run.k - code == 1) step<kEuclidean, 1>(run, x, from, count, code, nearest);
  }
}

bool nearest(const DirectRun& run, int64_t* index) {
  bool finite = true;
  for (int64_t first = 0; first < run.count; first += kRows) {
    const char* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = run.rows[first + r < run.count ? first + r : run.count - 1];
    GroupNearest found{{Doubles{} + __builtin_inf(), Doubles{} + __builtin_inf()}, {}};
    with_type(run.dtype, [&]<class T>(const T*) {
      const T* const* typed = reinterpret_cast<const T* const*>(rows);
      run.euclidean ? search_group<T, true>(run, typed, found) : search_group<T, false>(run, typed, found);
    });
    double value[kRows];
    int64_t number[kRows];
    __builtin_memcpy(value, found.value, sizeof value);
    __builtin_memcpy(number, found.index, sizeof number);
    for (int r = 0; r < kRows && first + r < run.count; ++r) {
      index[first + r] = number[r];
      finite = finite && __builtin_isfinite(value[r]);
    }
  }
  return finite;
}

}  // namespace

const VqAssignDirectKernel UEFL_VARIANT(vq_assign_direct){nearest};

}  // namespace uefl::cpu
