// Exponentials of one row of logits, and what is made of them, in the vectors of `Simd`; part of softmax_kernel.h.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {
namespace {

using Float = Simd::Float;
using Int = Simd::Int;
constexpr int kWidth = Simd::width;

#define UEFL_INLINE inline __attribute__((always_inline))

UEFL_INLINE void load(const float* from, Float& out) { __builtin_memcpy(&out, from, sizeof out); }
UEFL_INLINE void store(const Float& value, float* to) { __builtin_memcpy(to, &value, sizeof value); }

// e^x for x <= 0 within 1.5 ulp (tests/cpp/test_transition.cpp); 0 where the result is below 2^-126; NaN stays NaN. By reference: a
// vector return has no fixed ABI across flags. With n the integer nearest to x / ln 2, e^x = 2^n e^r, |r| <= ln 2 / 2.
UEFL_INLINE void exponential(Float& x) {
  constexpr float kRound = 0x1.8p23f;  // adding and subtracting it rounds to an integer
  const Float zero{};
  const auto lost = x < zero - 87.0f;
  const Float clamped = lost ? zero - 87.0f : x;
  const Float n = Simd::fma(clamped, zero + 0x1.715476p0f, zero + kRound) - kRound;
  Float r = Simd::fma(n, zero - 0x1.62e4p-1f, clamped);
  r = Simd::fma(n, zero - 0x1.7f7d1cp-20f, r);
  Float p = zero + 1.9875691500e-4f;  // Cephes, expf
  p = Simd::fma(p, r, zero + 1.3981999507e-3f);
  p = Simd::fma(p, r, zero + 8.3334519073e-3f);
  p = Simd::fma(p, r, zero + 4.1665795894e-2f);
  p = Simd::fma(p, r, zero + 1.6666665459e-1f);
  p = Simd::fma(p, r, zero + 5.0000001201e-1f);
  p = Simd::fma(p, r * r, r) + 1.0f;
  const Int scale = (__builtin_convertvector(n, Int) + 127) << 23;
  x = lost ? zero : p * (Float)scale;
}

// ln x for normal x within 2 ulp: x = 2^n m, 1 / sqrt 2 <= m < sqrt 2.
UEFL_INLINE void logarithm(Float& x) {
  const Float zero{};
  const Int bits = (Int)x - 0x3f3504f3;
  const Float n = __builtin_convertvector(bits >> 23, Float);
  const Float f = (Float)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
  Float p = zero + 7.0376836292e-2f;  // Cephes, logf
  p = Simd::fma(p, f, zero - 1.1514610310e-1f);
  p = Simd::fma(p, f, zero + 1.1676998740e-1f);
  p = Simd::fma(p, f, zero - 1.2420140846e-1f);
  p = Simd::fma(p, f, zero + 1.4249322787e-1f);
  p = Simd::fma(p, f, zero - 1.6668057665e-1f);
  p = Simd::fma(p, f, zero + 2.0000714765e-1f);
  p = Simd::fma(p, f, zero - 2.4999993993e-1f);
  p = Simd::fma(p, f, zero + 3.3333331174e-1f);
  const Float square = f * f;
  Float tail = p * f * square;
  tail = Simd::fma(n, zero - 0x1.bd0106p-13f, tail);
  tail = Simd::fma(square, zero - 0.5f, tail);
  x = Simd::fma(n, zero + 0x1.63p-1f, f + tail);
}

// row = exp(z - max z), zero from k on.
template <class T>
UEFL_INLINE void exponentials(const StridedRows& logits, int64_t n, float* row) {
  const int64_t k = logits.dim, end = padded(k);
  const T* z = reinterpret_cast<const T*>(element(logits, n, 0));
  Float most = Float{} - __builtin_inff(), value;
  for (int64_t j = 0; j < end; j += kWidth) {
    const int64_t left = k - j < kWidth ? k - j : kWidth;
    if (sizeof(T) == sizeof(float) && logits.dim_stride == 1) {
      Simd::load_first(reinterpret_cast<const float*>(z + j), left, value);
    } else {
      value = Float{} - __builtin_inff();
      for (int64_t i = 0; i < left; ++i) value[i] = static_cast<float>(widen(z[(j + i) * logits.dim_stride]));
    }
    most = value > most ? value : most;
    store(value, row + j);
  }
  const float shift = Simd::max_across(most);
  for (int64_t j = 0; j < end; j += kWidth) {
    load(row + j, value);
    value = value - shift;
    exponential(value);
    store(value, row + j);
  }
}

UEFL_INLINE float dot(const float* a, const float* b, int64_t end) {
  Float total{}, x, y;
  for (int64_t j = 0; j < end; j += kWidth) {
    load(a + j, x);
    load(b + j, y);
    total = Simd::fma(x, y, total);
  }
  return Simd::sum_across(total);
}

// out[j] = row[j], j < k.
template <class T>
UEFL_INLINE void write(const float* row, int64_t k, char* out) {
  T* to = reinterpret_cast<T*>(out);
  if constexpr (sizeof(T) == sizeof(float)) {
    for (int64_t j = 0; j < k; j += kWidth) {
      Float value;
      load(row + j, value);
      Simd::store_first(value, k - j < kWidth ? k - j : kWidth, to + j);
    }
  } else {
    for (int64_t j = 0; j < k; ++j) to[j] = narrow<T>(row[j]);
  }
}

// row = softmax(z), zero from k on.
template <class T>
UEFL_INLINE void probabilities(const StridedRows& logits, int64_t n, float* row) {
  const int64_t end = padded(logits.dim);
  exponentials<T>(logits, n, row);
  Float total{}, e;
  for (int64_t j = 0; j < end; j += kWidth) {
    load(row + j, e);
    total = total + e;
  }
  const float inverse = 1 / Simd::sum_across(total);
  for (int64_t j = 0; j < end; j += kWidth) {
    load(row + j, e);
    store(e * inverse, row + j);
  }
}

}  // namespace
}  // namespace uefl::cpu
