// Sixteen rows in a vector: what the MC-dropout kernel computes with, on every instruction set. Float results may differ in the last
// bits between instruction sets (FMA or not); random words never do.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // what GCC 12 says of its own _mm512_undefined_epi32
#include <immintrin.h>
#endif

#define UEFL_INLINE inline __attribute__((always_inline))

namespace uefl::cpu {
namespace {

typedef float Float16 __attribute__((vector_size(64)));
typedef int32_t Int16 __attribute__((vector_size(64)));
typedef uint32_t Uint16 __attribute__((vector_size(64)));
typedef uint64_t Ulong8 __attribute__((vector_size(64)));

// By reference throughout: a vector return has no fixed ABI across flags.

// sum += x * factor
UEFL_INLINE void multiply_add(const Float16& x, float factor, Float16& sum) {
#if defined(__AVX512F__)
  sum = (Float16)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(factor), (__m512)sum);
#elif defined(__FMA__)
  __m256 part[2], term[2];
  __builtin_memcpy(part, &sum, sizeof part);
  __builtin_memcpy(term, &x, sizeof term);
  for (int i = 0; i < 2; ++i) part[i] = _mm256_fmadd_ps(term[i], _mm256_set1_ps(factor), part[i]);
  __builtin_memcpy(&sum, part, sizeof sum);
#else
  sum += x * factor;
#endif
}

// Zero where word < threshold, bit by bit, so that what is dropped leaves nothing, not even a NaN.
UEFL_INLINE void keep_from(const Uint16& word, uint32_t threshold, Float16& x) {
#if defined(__AVX512F__)
  const __mmask16 keep = _mm512_cmpge_epu32_mask((__m512i)word, _mm512_set1_epi32(static_cast<int>(threshold)));
  x = (Float16)_mm512_maskz_mov_ps(keep, (__m512)x);
#else
  x = (Float16)((Uint16)x & (Uint16)(word >= threshold));
#endif
}

// The 64-bit products of the low halves of x, whatever the high halves hold.
UEFL_INLINE void multiply(const Ulong8& x, uint32_t factor, Ulong8& product) {
#if defined(__AVX512F__)
  product = (Ulong8)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  __m256i part[2];
  __builtin_memcpy(part, &x, sizeof part);
  for (__m256i& half : part) half = _mm256_mul_epu32(half, _mm256_set1_epi64x(factor));
  __builtin_memcpy(&product, part, sizeof product);
#else
  product = (x & 0xffffffffu) * factor;
#endif
}

// The low halves of even and odd, in turn.
UEFL_INLINE void interleave(const Ulong8& even, const Ulong8& odd, Uint16& words) {
#if defined(__AVX512F__)
  words = (Uint16)_mm512_mask_shuffle_epi32((__m512i)even, 0xaaaa, (__m512i)odd, _MM_PERM_CCAA);
#else
  const Ulong8 pairs = (even & 0xffffffffu) | (odd << 32);
  words = (Uint16)pairs;  // the targets are little-endian
#endif
}

constexpr float kLeastExponent = -87;  // exp of it is still a normal float

// exp(x) for x in [-87, 0], within 2 units in the last place; NaN stays NaN. 2^n times a polynomial on |r| <= ln(2) / 2 (Cephes).
UEFL_INLINE void exponential(const Float16& x, Float16& result) {
  const float round = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const Float16 shifted = x * 1.44269504f + round, n = shifted - round;
  Float16 r = x;
  multiply_add(n, -0.693359375f, r);
  multiply_add(n, 2.12194440e-4f, r);
  Float16 p = Float16{} + 1.9875691500e-4f;
  constexpr float kCoefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  for (const float coefficient : kCoefficients) p = p * r + coefficient;
  p = p * r * r + r + 1.0f;
  result = (Float16)((Int16)p + ((Int16)shifted << 23));
}

// ln(x) for finite x >= 1, within 2 units in the last place of 1. A polynomial on [sqrt(1/2), sqrt(2)) (Cephes).
UEFL_INLINE void logarithm(const Float16& x, Float16& result) {
  const Int16 bits = (Int16)x - 0x3f3504f3;  // of sqrt(1/2)
  const Int16 exponent = bits >> 23;
  const Float16 m = (Float16)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, n = __builtin_convertvector(exponent, Float16), square = m * m;
  Float16 p = Float16{} + 7.0376836292e-2f;
  constexpr float kCoefficients[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                     -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  for (const float coefficient : kCoefficients) p = p * m + coefficient;
  result = (p * m * square - 2.12194440e-4f * n) - 0.5f * square + m + 0.693359375f * n;
}

// x to act(x), absolute error below 1e-6 for |x| <= 8.
UEFL_INLINE void activate(McActivation activation, Float16& x) {
  const Float16 size = x < 0.0f ? -x : x;
  const auto decay = [](const Float16& exponent, Float16& value) {
    const Float16 limited = exponent < kLeastExponent ? Float16{} + kLeastExponent : exponent;
    exponential(limited, value);
  };
  Float16 e;
  switch (activation) {
    case McActivation::relu:
      x = x < 0.0f ? Float16{} : x;
      return;
    case McActivation::silu:
      decay(-size, e);
      x = x * (x < 0.0f ? e : Float16{} + 1.0f) / (1.0f + e);
      return;
    case McActivation::tanh: {
      decay(-2.0f * size, e);
      const Float16 positive = (1.0f - e) / (1.0f + e);
      x = x < 0.0f ? -positive : positive;
      return;
    }
    case McActivation::gelu: {  // erf by Abramowitz and Stegun 7.1.26
      decay(-0.5f * x * x, e);
      const Float16 t = 1.0f / (1.0f + (0.3275911f * 0.70710678f) * size);
      const Float16 p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
      const Float16 tail = 0.5f * p * e;  // of the normal distribution, beyond |x|
      x = x * (x < 0.0f ? tail : 1.0f - tail);
      return;
    }
  }
}

}  // namespace
}  // namespace uefl::cpu
