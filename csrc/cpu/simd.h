// The vectors of an instruction set and the operations of the kernels on them. One source compiles for all
// instruction sets. It uses intrinsics only where GCC does not compile vector types to the intended
// instruction. Vectors are as wide as the registers, because GCC moves wider ones through memory. Float
// results may differ in the last bits between instruction sets (FMA or not); integers never do.
#pragma once

#include <cstdint>

#include "common/mc_dropout.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__SSE2__)
// GCC 12 warns about the undefined operands in its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

#define UEFL_INLINE inline __attribute__((always_inline))

namespace uefl::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#define UEFL_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define UEFL_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#define UEFL_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define UEFL_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
constexpr int kLanes = 4;
#define UEFL_LOW 0, 4, 1, 5
#define UEFL_HIGH 2, 6, 3, 7
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));
typedef int64_t SignedLongs __attribute__((vector_size(4 * kLanes)));

constexpr int kDoubles = kLanes / 2;
typedef double Doubles __attribute__((vector_size(4 * kLanes)));
typedef float HalfFloats __attribute__((vector_size(4 * kDoubles)));

UEFL_INLINE Floats broadcast(float value) {
  return value - Floats{};
}  // not `0 + value`, which would turn -0 into 0
UEFL_INLINE Ints broadcast(int32_t value) { return value - Ints{}; }

template <class Vector>
UEFL_INLINE void load(const void* from, Vector& out) {
  __builtin_memcpy(&out, from, sizeof out);
}
template <class Vector>
UEFL_INLINE void store(const Vector& value, void* to) {
  __builtin_memcpy(to, &value, sizeof value);
}

// Return the smaller or the larger of two numbers, or b if one is NaN.
UEFL_INLINE Floats least(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
UEFL_INLINE Floats most(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
UEFL_INLINE Floats magnitude(const Floats& x) { return (Floats)((Ints)x & 0x7fffffff); }

#if defined(__AVX512F__)
UEFL_INLINE float least_across(const Floats& x) { return _mm512_reduce_min_ps((__m512)x); }
UEFL_INLINE float most_across(const Floats& x) { return _mm512_reduce_max_ps((__m512)x); }
UEFL_INLINE float sum_across(const Floats& x) { return _mm512_reduce_add_ps((__m512)x); }
#else
typedef float Floats4 __attribute__((vector_size(16)));
// Reduces all lanes by halves with combine() and returns lane 0.
template <class Combine>
UEFL_INLINE float across(const Floats& x, const Combine& combine) {
  Floats4 half;
  __builtin_memcpy(&half, &x, sizeof half);
  if constexpr (kLanes == 8) {
    Floats4 high;
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof half, sizeof high);
    half = combine(half, high);
  }
  const float even = combine(half[0], half[2]), odd = combine(half[1], half[3]);
  return combine(even, odd);
}
UEFL_INLINE float least_across(const Floats& x) {
  return across(x, [](auto a, auto b) { return a < b ? a : b; });
}
UEFL_INLINE float most_across(const Floats& x) {
  return across(x, [](auto a, auto b) { return a > b ? a : b; });
}
UEFL_INLINE float sum_across(const Floats& x) {
  return across(x, [](auto a, auto b) { return a + b; });
}
#endif

// Load or store the first n elements. The other loaded lanes are -infinity.
#if defined(__AVX512F__)
UEFL_INLINE __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
UEFL_INLINE void load_first(const float* from, int64_t n, Floats& out) {
  out = (Floats)_mm512_mask_loadu_ps(_mm512_set1_ps(-__builtin_inff()), first(n), from);
}
UEFL_INLINE void store_first(const Floats& value, int64_t n, float* to) {
  _mm512_mask_storeu_ps(to, first(n), (__m512)value);
}
#elif defined(__AVX2__)
UEFL_INLINE __m256i first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
UEFL_INLINE void load_first(const float* from, int64_t n, Floats& out) {
  const __m256i mask = first(n);
  out = (Floats)_mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), _mm256_maskload_ps(from, mask),
                                 _mm256_castsi256_ps(mask));
}
UEFL_INLINE void store_first(const Floats& value, int64_t n, float* to) {
  _mm256_maskstore_ps(to, first(n), (__m256)value);
}
#else
UEFL_INLINE void load_first(const float* from, int64_t n, Floats& out) {
  out = Floats{} - __builtin_inff();
  for (int64_t i = 0; i < n; ++i) out[i] = from[i];
}
UEFL_INLINE void store_first(const Floats& value, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = value[i];
}
#endif

// Returns one bit per lane: a <= b.
UEFL_INLINE uint32_t lanes_not_above(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LE_OQ)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmple_ps((__m128)a, (__m128)b)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(a[lane] <= b[lane]) << lane;
  return bits;
#endif
}

// Returns x with infinity in one lane. The function does not write to memory, because reading a vector after
// a partial write stalls.
UEFL_INLINE Floats with_infinity(const Floats& x, int lane) {
  Ints numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers == lane ? broadcast(__builtin_inff()) : x;
}

// Computes sum -= a * b.
UEFL_INLINE void subtract_product(const Floats& a, const Floats& b, Floats& sum) {
#if defined(__AVX512F__)
  sum = (Floats)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  sum = (Floats)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON)
  sum = (Floats)vfmsq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  sum -= a * b;
#endif
}

// Loads kDoubles elements as float64.
UEFL_INLINE void widen(const float* from, Doubles& out) {
#if defined(__AVX512F__)
  out = (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
  out = (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
  HalfFloats narrow;
  load(from, narrow);
  out = __builtin_convertvector(narrow, Doubles);
#endif
}
UEFL_INLINE void widen(const double* from, Doubles& out) { load(from, out); }
UEFL_INLINE void store_narrow(const Doubles& value, float* to) {
  store(__builtin_convertvector(value, HalfFloats), to);
}

// Keeps x in a register. Otherwise the compiler loads an operand from memory for each use.
UEFL_INLINE void keep_in_register([[maybe_unused]] Doubles& x) {
#if defined(__SSE2__)
  asm("" : "+v"(x));
#elif defined(__ARM_NEON)
  asm("" : "+w"(x));
#endif
}

// Rounds numbers of at most 2^62 to the nearest integers, ties to even.
UEFL_INLINE SignedLongs rounded(const Doubles& x) {
#if defined(__AVX512F__)
  return (SignedLongs)_mm512_cvtpd_epi64((__m512d)x);
#else
  // Adding 1.5 * 2^52 leaves an integer below 2^51 in the low bits. The first sum rounds x to a multiple of
  // 2^26, which is even, and the second sum rounds the rest. Products are exact, so fusing them changes
  // nothing.
  constexpr double kTop = 0x1.8p52;
  constexpr uint64_t kTopBits = 0x4338000000000000u;
#if defined(__FMA__)
  const __m256d value = (__m256d)x, top = _mm256_set1_pd(kTop),
                upper = _mm256_fmadd_pd(value, _mm256_set1_pd(0x1p-26), top);
  const __m256d lower = _mm256_fnmadd_pd(upper - top, _mm256_set1_pd(0x1p26), value) + top;
#else
  const Doubles upper = x * 0x1p-26 + kTop, lower = (x - (upper - kTop) * 0x1p26) + kTop;
#endif
  return (SignedLongs)(((Longs)upper << 26) + (Longs)lower - ((kTopBits << 26) + kTopBits));
#endif
}

// Rounds numbers of at most 2^51 in the same way, with fewer operations.
UEFL_INLINE SignedLongs rounded_narrow(const Doubles& x) {
#if defined(__AVX512F__)
  return rounded(x);
#else
  return (SignedLongs)((Longs)(x + 0x1.8p52) - 0x4338000000000000u);
#endif
}

// Adds the two products of each pair of 16-bit numbers to a 32-bit sum. The function has assembly, because
// with intrinsics GCC 12 copies every sum, or moves all products before all sums. The products then spill.
UEFL_INLINE void add_pair_products(const Ints& a, const Ints& b, Ints& sum) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVX2__)
  Ints products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(a), "v"(b));
#elif defined(__SSE2__)
  sum += (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__ARM_NEON)
  const int16x8_t left = (int16x8_t)a, right = (int16x8_t)b;
  sum += (Ints)vpaddq_s32(vmull_s16(vget_low_s16(left), vget_low_s16(right)), vmull_high_s16(left, right));
#else
  sum += (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if defined(__SSE2__)
// Rounds to the nearest integers.
UEFL_INLINE Ints rounded(const Floats& x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
  return (Ints)_mm_cvtps_epi32((__m128)x);
#endif
}

// Packs two vectors of numbers into pairs of 16 bits. The order of the pairs depends on the instruction set.
UEFL_INLINE Ints pairs_of(const Ints& a, const Ints& b) {
#if defined(__AVX512F__)
  return (Ints)_mm512_packs_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_packs_epi32((__m256i)a, (__m256i)b);
#else
  return (Ints)_mm_packs_epi32((__m128i)a, (__m128i)b);
#endif
}
#endif

// Computes sum += x * factor.
UEFL_INLINE void multiply_add(const Floats& x, float factor, Floats& sum) {
#if defined(__AVX512F__)
  sum = (Floats)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(factor), (__m512)sum);
#elif defined(__FMA__)
  sum = (Floats)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(factor), (__m256)sum);
#elif defined(__ARM_NEON)
  sum = (Floats)vfmaq_n_f32((float32x4_t)sum, (float32x4_t)x, factor);
#else
  sum += x * factor;
#endif
}

// Transposes a square of vectors. A perfect shuffle rotates the bits of an element's address by one. So
// log2(kLanes) shuffles exchange the bits of the row with the bits of the column.
UEFL_INLINE void transpose(Floats (&square)[kLanes]) {
#if defined(__clang__)
#define UEFL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UEFL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
#pragma GCC unroll 4
  for (int size = 1; size < kLanes; size *= 2) {
    Floats shuffled[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      shuffled[2 * i] = UEFL_SHUFFLE(square[i], square[i + kLanes / 2], UEFL_LOW);
      shuffled[2 * i + 1] = UEFL_SHUFFLE(square[i], square[i + kLanes / 2], UEFL_HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = shuffled[i];
  }
#undef UEFL_SHUFFLE
}

// Sets x to zero where word < threshold. A bit mask does this, so that a dropped NaN becomes zero too.
UEFL_INLINE void keep_from(const Words& word, uint32_t threshold, Floats& x) {
#if defined(__AVX512F__)
  const __mmask16 keep =
      _mm512_cmpge_epu32_mask((__m512i)word, _mm512_set1_epi32(static_cast<int>(threshold)));
  x = (Floats)_mm512_maskz_mov_ps(keep, (__m512)x);
#else
  x = (Floats)((Words)x & (Words)(word >= threshold));
#endif
}

// Computes the 64-bit products of the low halves of x, and ignores the high halves.
UEFL_INLINE void multiply(const Longs& x, uint32_t factor, Longs& product) {
#if defined(__AVX512F__)
  product = (Longs)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  product = (Longs)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#else
  product = (x & 0xffffffffu) * factor;
#endif
}

// Interleaves the low halves of `even` and `odd`.
UEFL_INLINE void interleave(const Longs& even, const Longs& odd, Words& words) {
#if defined(__AVX512F__)
  words = (Words)_mm512_mask_shuffle_epi32((__m512i)even, 0xaaaa, (__m512i)odd, _MM_PERM_CCAA);
#else
  const Longs pairs = (even & 0xffffffffu) | (odd << 32);
  words = (Words)pairs;  // the targets are little-endian
#endif
}

// Returns a * b + c, rounded once if the instruction set can do so.
UEFL_INLINE Floats fused(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
UEFL_INLINE Doubles fused(const Doubles& a, const Doubles& b, const Doubles& c) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

// Computes e^x for x <= 0 within 1.5 ulp (tests/cpp/test_transition.cpp), or 0 if the result is below 2^-126.
// NaN stays NaN. With n the integer nearest to x / ln 2, e^x = 2^n e^r and |r| <= ln 2 / 2.
UEFL_INLINE void small_exponential(Floats& x) {
  constexpr float kRound = 0x1.8p23f;  // adding and subtracting it rounds to an integer
  const Floats zero{};
  const auto lost = x < zero - 87.0f;
  const Floats clamped = lost ? zero - 87.0f : x;
  const Floats n = fused(clamped, zero + 0x1.715476p0f, zero + kRound) - kRound;
  Floats r = fused(n, zero - 0x1.62e4p-1f, clamped);
  r = fused(n, zero - 0x1.7f7d1cp-20f, r);
  Floats p = zero + 1.9875691500e-4f;  // Cephes, expf
  p = fused(p, r, zero + 1.3981999507e-3f);
  p = fused(p, r, zero + 8.3334519073e-3f);
  p = fused(p, r, zero + 4.1665795894e-2f);
  p = fused(p, r, zero + 1.6666665459e-1f);
  p = fused(p, r, zero + 5.0000001201e-1f);
  p = fused(p, r * r, r) + 1.0f;
  const Ints scale = (__builtin_convertvector(n, Ints) + 127) << 23;
  x = lost ? zero : p * (Floats)scale;
}

// Computes ln x for normal x within 2 ulp: x = 2^n m, 1 / sqrt 2 <= m < sqrt 2.
UEFL_INLINE void normal_logarithm(Floats& x) {
  const Floats zero{};
  const Ints bits = (Ints)x - 0x3f3504f3;
  const Floats n = __builtin_convertvector(bits >> 23, Floats);
  const Floats f = (Floats)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
  Floats p = zero + 7.0376836292e-2f;  // Cephes, logf
  p = fused(p, f, zero - 1.1514610310e-1f);
  p = fused(p, f, zero + 1.1676998740e-1f);
  p = fused(p, f, zero - 1.2420140846e-1f);
  p = fused(p, f, zero + 1.4249322787e-1f);
  p = fused(p, f, zero - 1.6668057665e-1f);
  p = fused(p, f, zero + 2.0000714765e-1f);
  p = fused(p, f, zero - 2.4999993993e-1f);
  p = fused(p, f, zero + 3.3333331174e-1f);
  const Floats square = f * f;
  Floats tail = p * f * square;
  tail = fused(n, zero - 0x1.bd0106p-13f, tail);
  tail = fused(square, zero - 0.5f, tail);
  x = fused(n, zero + 0x1.63p-1f, f + tail);
}

// MC dropout uses the next two functions. Their order of operations differs from the two functions above.
// Both pairs stay, so that results keep their bits.
constexpr float kLeastExponent = -87;  // its exponential is still a normal float

// Computes exp(x) for x in [-87, 0] within 2 ulp. NaN stays NaN. The result is 2^n times a polynomial on |r|
// <= ln(2) / 2 (Cephes).
UEFL_INLINE void exponential(const Floats& x, Floats& result) {
  const float round = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const Floats shifted = x * 1.44269504f + round, n = shifted - round;
  Floats r = x;
  multiply_add(n, -0.693359375f, r);
  multiply_add(n, 2.12194440e-4f, r);
  Floats p = Floats{} + 1.9875691500e-4f;
  constexpr float kCoefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                     5.0000001201e-1f};
  for (const float coefficient : kCoefficients) p = p * r + coefficient;
  p = p * r * r + r + 1.0f;
  result = (Floats)((Ints)p + ((Ints)shifted << 23));
}

// Computes ln(x) for finite x >= 1, within 2 units in the last place of 1. It uses a polynomial on
// [sqrt(1/2), sqrt(2)) (Cephes).
UEFL_INLINE void logarithm(const Floats& x, Floats& result) {
  const Ints bits = (Ints)x - 0x3f3504f3;  // bits of sqrt(1/2)
  const Ints exponent = bits >> 23;
  const Floats m = (Floats)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f,
               n = __builtin_convertvector(exponent, Floats), square = m * m;
  Floats p = Floats{} + 7.0376836292e-2f;
  constexpr float kCoefficients[] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f,
                                     1.4249322787e-1f,  -1.6668057665e-1f, 2.0000714765e-1f,
                                     -2.4999993993e-1f, 3.3333331174e-1f};
  for (const float coefficient : kCoefficients) p = p * m + coefficient;
  result = (p * m * square - 2.12194440e-4f * n) - 0.5f * square + m + 0.693359375f * n;
}

// Applies an activation with an absolute error below 1e-6 for |x| <= 8.
UEFL_INLINE void activate(McActivation activation, Floats& x) {
  const Floats size = x < 0.0f ? -x : x;
  const auto decay = [](const Floats& exponent, Floats& value) {
    const Floats limited = exponent < kLeastExponent ? Floats{} + kLeastExponent : exponent;
    exponential(limited, value);
  };
  Floats e;
  switch (activation) {
    case McActivation::relu:
      x = x < 0.0f ? Floats{} : x;
      return;
    case McActivation::silu:
      decay(-size, e);
      x = x * (x < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e);
      return;
    case McActivation::tanh: {
      decay(-2.0f * size, e);
      const Floats positive = (1.0f - e) / (1.0f + e);
      x = x < 0.0f ? -positive : positive;
      return;
    }
    case McActivation::gelu: {  // erf by Abramowitz and Stegun 7.1.26
      decay(-0.5f * x * x, e);
      const Floats t = 1.0f / (1.0f + (0.3275911f * 0.70710678f) * size);
      const Floats p =
          ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) *
          t;
      const Floats tail = 0.5f * p * e;  // probability of the normal distribution above |x|
      x = x * (x < 0.0f ? tail : 1.0f - tail);
      return;
    }
  }
}

}  // namespace
}  // namespace uefl::cpu
