// The steps of vq after the search, on one run of rows, and the gradient.
#include "common/rotation.h"
#include "cpu/simd.h"
#include "cpu/variant.h"
#include "cpu/vq_kernel.h"

namespace uefl::cpu {
namespace {

// The sum over a row consists of eight partial sums on every instruction set, so that all add in the same
// order.
constexpr int kSums = 8, kParts = kSums / kDoubles;

UEFL_INLINE double sum(const Doubles (&parts)[kParts]) {
  double lane[kSums];
  __builtin_memcpy(lane, parts, sizeof lane);
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// Loads the next elements of x as float32 or float64. They are zero from the n-th on.
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

// Returns the squared distance between x and its codeword. Raises `largest` to the bits of |x|.
template <class T>
inline double compare_row(const T* x, const double* code, int64_t d, int64_t& largest) {
  Doubles total[kParts] = {}, value, codeword;
  SignedLongs most = {};
  const auto add = [&](int64_t j, int part) __attribute__((always_inline)) {
    load(x + j, d - j, value);
    load(code + j, d - j, codeword);
    const Doubles difference = value - codeword;
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
      if (run.quantized)
        __builtin_memcpy(run.quantized + position * bytes, run.codewords + code * bytes, bytes);
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

// The gradient.

template <class T, class Vector>
UEFL_INLINE void store(const Vector& value, T* out, int64_t n) {
  constexpr int kCount = sizeof value / sizeof value[0];
  if (n < kCount) {
    for (int i = 0; i < n; ++i) out[i] = narrow<T>(value[i]);
  } else if constexpr (sizeof(T) == sizeof value[0]) {
    store(value, out);
  } else if constexpr (sizeof(T) == sizeof(float)) {
    store_narrow(value, out);
  } else {
    for (int i = 0; i < kCount; ++i) out[i] = narrow<T>(value[i]);
  }
}

// One segment of one row.
template <class T, class Codeword>
struct Segment {
  const T *x, *g;
  const Codeword* codeword;
  T* out;
  int64_t d;
};

template <class T, class Codeword>
inline void backward_rotated(const Segment<T, Codeword>& segment, double pull) {
  Doubles xx[kParts] = {}, qq[kParts] = {}, xq[kParts] = {}, xg[kParts] = {}, qg[kParts] = {};
  Doubles x = {}, q = {}, g = {};
  const auto load_all = [&](int64_t j) __attribute__((always_inline)) {
    load(segment.x + j, segment.d - j, x);
    load(segment.codeword + j, segment.d - j, q);
    load(segment.g + j, segment.d - j, g);
  };
  for (int64_t start = 0; start < segment.d; start += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const int64_t j = start + part * kDoubles;
      if (j >= segment.d) break;
      load_all(j);
      xx[part] += x * x, qq[part] += q * q, xq[part] += x * q, xg[part] += x * g, qg[part] += q * g;
    }
  }
  const Rotation turn = rotation({sum(xx), sum(qq), sum(xq), sum(xg), sum(qg)});
  for (int64_t j = 0; j < segment.d; j += kDoubles) {  // reads again, from the first-level cache
    load_all(j);
    const Doubles gradient = g * turn.scale + (x * turn.along + q * turn.towards) + (x - q) * pull;
    store(gradient, segment.out + j, segment.d - j);
  }
}

template <class T, class Codeword, bool has_g>
inline void backward_straight(const Segment<T, Codeword>& segment, Codeword pull) {
  typedef Codeword Vector __attribute__((vector_size(sizeof(Floats))));
  constexpr int64_t kCount = sizeof(Vector) / sizeof(Codeword);
  for (int64_t j = 0; j < segment.d; j += kCount) {
    Vector x = {}, q = {}, g = {};
    load(segment.x + j, segment.d - j, x);
    load(segment.codeword + j, segment.d - j, q);
    if constexpr (has_g) load(segment.g + j, segment.d - j, g);
    const Vector pulled = (x - q) * pull;
    store(has_g ? g + pulled : pulled, segment.out + j, segment.d - j);
  }
}

template <class T>
inline T* row(const BufferedRows& span, int64_t n, int64_t column) {
  return reinterpret_cast<T*>(const_cast<char*>(element(span.rows, span.first + n, column)));
}

template <class T, class Codeword>
void backward_typed(const VqBackwardRun& run) {
  const int64_t segments = run.x.rows.dim / run.d;
  const bool has_g = run.grad_quantized.rows.data != nullptr;
  for (int64_t n = 0; n < run.rows; ++n) {
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t code = run.indices[n * segments + s] + s * run.codebook_step, column = s * run.d;
      const Segment<T, Codeword> segment{
          .x = row<T>(run.x, n, column),
          .g = has_g ? row<T>(run.grad_quantized, n, column) : nullptr,
          .codeword = static_cast<const Codeword*>(run.codewords) + code * run.d,
          .out = row<T>(run.grad_x, n, column),
          .d = run.d};
      if (!has_g) {
        backward_straight<T, Codeword, false>(segment, static_cast<Codeword>(run.pull));
      } else if (run.rotation) {
        backward_rotated(segment, run.pull);
      } else {
        backward_straight<T, Codeword, true>(segment, static_cast<Codeword>(run.pull));
      }
    }
  }
}

void backward(const VqBackwardRun& run) {
  with_type(run.x.rows.dtype, [&]<class T>(const T*) {
    if constexpr (sizeof(T) == sizeof(double)) {
      backward_typed<T, double>(run);
    } else {
      run.wide ? backward_typed<T, double>(run) : backward_typed<T, float>(run);
    }
  });
}

}  // namespace

const VqKernel UEFL_VARIANT(vq){replace, add, backward};

}  // namespace uefl::cpu
