// What follows the search, on one run of rows. Each vq.<isa>.cpp includes this body under the flags of its instruction set;
// no standard templates and internal linkage throughout, for the reason given in strided_rows.h.
#pragma once

#include <cstdint>

#include "cpu/row_buffer.h"
#include "cpu/strided_rows.h"
#include "cpu/vq_backward.h"

namespace uefl::cpu {

// Pointers to [N, ..] are to the first row of the run; the elements of a row of x are side by side.
struct VqRun {
  Span x;
  int64_t rows, d;
  int64_t codebook_step;   // codewords from one segment's codebook to the next: k, or 0 when all segments share one
  const int64_t* indices;  // [N, S]
  const char* codes;       // [.., k, d] in the dtype of x
  const double* exact;     // the same, in float64
  char* quantized;         // [N, S * d] in the dtype of x
  int64_t* counts;         // [.., k]
  int64_t* largest;        // [.., k] |x| in float64, as bits
};

struct VqSums {
  Span x;
  int64_t rows, d, codebook_step;
  const int64_t* indices;
  const double* scales;  // [.., k] units of `fixed` in 1.0; 0: leave its rows out
  int64_t* fixed;        // [.., k, d]
};

struct VqBackwardRun {
  Span x, grad_quantized, grad_x;
  int64_t rows, d, codebook_step;
  const int64_t* indices;
  const void* codes;  // in float64 where wide, else in float32
  bool wide, rotation;
  double pull;
};

struct VqKernel {
  // Writes quantized, adds to counts, raises largest, returns the sum of (x - codeword)^2.
  double (*replace)(const VqRun& run);
  // Adds the rows to fixed.
  void (*add)(const VqSums& sums);
  // Writes the gradient.
  void (*backward)(const VqBackwardRun& run);
};

extern const VqKernel vq_portable, vq_avx2, vq_avx512;

}  // namespace uefl::cpu

#if defined(UEFL_KERNEL_BODY)

#include "cpu/simd.h"

namespace uefl::cpu {
namespace {

// Sums of a row are eight partial sums, on every instruction set, so that all of them add in the same order.
constexpr int kSums = 8, kParts = kSums / kDoubles;

UEFL_INLINE double sum(const Doubles (&parts)[kParts]) {
  double lane[kSums];
  __builtin_memcpy(lane, parts, sizeof lane);
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// The next elements of x in float32 or float64, zero from the n-th on.
template <class T, class Vector>
UEFL_INLINE void load(const T* x, int64_t n, Vector& out) {
  constexpr int kCount = sizeof out / sizeof out[0];
  if (n < kCount) {
    out = Vector{};
    for (int i = 0; i < n; ++i) out[i] = widen(x[i]);
  } else if constexpr (sizeof(T) * kCount == sizeof out) {
    load(x, out);
  } else if constexpr (sizeof(T) == sizeof(float)) {
    widen(x, out);
  } else {
    for (int i = 0; i < kCount; ++i) out[i] = widen(x[i]);
  }
}

// Returns the squared distance of x to its codeword; raises largest to the bits of |x|.
template <class T>
inline double compare_row(const T* x, const double* code, int64_t d, int64_t& largest) {
  Doubles total[kParts] = {}, value, target;
  SignedLongs most = {};
  const auto add = [&](int64_t j, int part) __attribute__((always_inline)) {
    load(x + j, d - j, value);
    load(code + j, d - j, target);
    const Doubles difference = value - target;
    total[part] += difference * difference;
    const SignedLongs bits = (SignedLongs)value & INT64_MAX;
    most = bits > most ? bits : most;
  };
  int64_t j = 0;
  for (; j + kSums <= d; j += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) add(j + part * kDoubles, part);
  }
  for (int part = 0; part < kParts && j < d; ++part, j += kDoubles) add(j, part);
  for (int i = 0; i < kDoubles; ++i) largest = most[i] > largest ? most[i] : largest;
  return sum(total);
}

template <class T>
inline void add_row(const T* x, int64_t d, double scale, int64_t* fixed) {
  int64_t j = 0;
  Doubles value;
  for (; j + kDoubles <= d; j += kDoubles) {
    load(x + j, kDoubles, value);
    SignedLongs sum;
    load(fixed + j, sum);
    store(sum + rounded(value * scale), fixed + j);
  }
  if (j == d) return;
  load(x + j, d - j, value);
  const SignedLongs units = rounded(value * scale);
  for (int i = 0; j + i < d; ++i) fixed[j + i] += units[i];
}

template <class T>
double replace_typed(const VqRun& run) {
  const int64_t segments = run.x.rows.dim / run.d, bytes = run.d * static_cast<int64_t>(sizeof(T));
  double error = 0;
  for (int64_t n = 0; n < run.rows; ++n) {
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t position = n * segments + s, code = run.indices[position] + s * run.codebook_step;
      const T* x = reinterpret_cast<const T*>(element(run.x.rows, run.x.first + n, s * run.d));
      __builtin_memcpy(run.quantized + position * bytes, run.codes + code * bytes, bytes);
      ++run.counts[code];
      error += compare_row(x, run.exact + code * run.d, run.d, run.largest[code]);
    }
  }
  return error;
}

template <class T>
void add_typed(const VqSums& sums) {
  const int64_t segments = sums.x.rows.dim / sums.d;
  for (int64_t n = 0; n < sums.rows; ++n) {
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t code = sums.indices[n * segments + s] + s * sums.codebook_step;
      if (sums.scales[code] == 0) continue;
      const T* x = reinterpret_cast<const T*>(element(sums.x.rows, sums.x.first + n, s * sums.d));
      add_row(x, sums.d, sums.scales[code], sums.fixed + code * sums.d);
    }
  }
}

double replace(const VqRun& run) {
  double error = 0;
  with_type(run.x.rows.dtype, [&]<class T>(const T*) { error = replace_typed<T>(run); });
  return error;
}

void add(const VqSums& sums) {
  with_type(sums.x.rows.dtype, [&]<class T>(const T*) { add_typed<T>(sums); });
}

}  // namespace
}  // namespace uefl::cpu

#endif
