// When does the winner of a float32 search equal the winner of the float64 definition?
//
// Notation: u = 2^-24, v = 2^-53. For one row x and codewords c_k, with a center mu of our choice (0 for
// cosine):
//   y = x - mu, b_k = c_k - mu,   score_k = h_k - y.b_k,   h_k = |b_k|^2 / 2 for l2 and 0 for cosine.
// In real numbers score_k differs from |x - c_k|^2 / 2 (l2) or from -x.c_k (cosine) by a term without k, so
// the order is the same. H = max h_k, G = max |b_k|. The computed score differs from the real score_k by at
// most
//   chain        d FMAs, or d products and d differences:      (d + 1) u (H + |y| G) / (1 - (d + 1) u)
//   inputs       y and b_k each rounded once to float32:       (2 u + u^2) |y| G
//   h_k          summed in float64, rounded once:              (u + (d + 3) v) H
//   underflow    per operation or input, even flushed to zero: 2^-126, times 1, |y| or G
// and the float64 definition differs from its own real value by at most
//   l2           (d + 3) v |x - c_k|^2 / 2 <= (d + 3) v (|y|^2 + 2 H)
//   cosine       (d + 2) v |y| G
// For d <= 2^16 the quotient is below 1.005, and all terms in v except (d + 3) v |y|^2 are smaller than the
// difference of (d + 8) and (d + 3):
//   E = (d + 8) (1.01 u (H + |y| G) + v |y|^2 [l2 only] + 2^-125 (1 + |y| + G)).
// If second - best > 2 E, every other codeword is strictly worse in the float64 definition. Otherwise the
// winner is among the codewords with a score of at most best + 2 E. A row, or a codebook, that is not finite
// or may overflow gets E = infinity.
//
// Matrix units take bfloat16 (8 bits, unit roundoff w = 2^-8). Round twice, y = y1 + y2 + y3: y1 is nearest
// to y, and y2 is nearest to y - y1 (which float32 holds exactly); b_k in the same way. R = |y - y1| and T =
// max |b_k - b1_k| are measured, so |y2| <= (1 + w) R, |y3| <= w R, |y1 + y2| <= (1 + w^2) |y|. Products of
// two bfloat16 are exact in float32. The 3 d products y1.b1, y1.b2 and y2.b1 are summed in any order; each
// sum is rounded to nearest, so each product is rounded at most 3 d times.
//     chain          3 d u (1 + w)^2 (1 + 2 w) |y| G / (1 - 3 d u)                               < 3.12 d u
//     |y| G left out       y2.b2 + y3.b + (y1 + y2).b3                        <= 1.01 (R T + w R G + w |y| T)
//     h_k            rounded, and the sum subtracted from it: 2.01 u H + 1.05 u |y| G + (d + 3) v H
// Inputs and the definition count as for float32. At most 6 d + 2 operations and four inputs of an element
// flush to zero. Zeros that pad d change no sum. With (d + 8) as above:
//   E = (d + 8) (3.12 u |y| G + v (|y|^2 + 3 H) [l2 only] + 2^-123 (1 + |y| + G)) + 3 u H + 1.01 (R T + w R G
//   + w |y| T).
// One product, y1.b1, in a prefilter: the chain is 1.02 d u |y| G, and (y - y1).b + y1.(b - b1) is left out:
//   E = (d + 8) (1.05 u |y| G + v (|y|^2 + 3 H) [l2 only] + 2^-123 (1 + |y| + G)) + 3 u H + 1.01 (R G + |y|
//   T).
//
// With 16-bit integers, y1 = p q with integers q and a unit p in float32, and b1 in the same way; R and T are
// measured again, |y1| <= |y| + R. The products of integers are summed exactly (the units keep the sums below
// 2^31), then rounded to float32, multiplied by the rounded product of the units, and subtracted from h_k
// with one rounding: 3.01 u (|y| + R)(G + T) + u H. Without FMA there is one more rounding, and R and T are
// measured up to u |y| and u G too small: 6.1 u. With the inputs, the rounding of h_k, the terms in v, and
// few underflows:
//   E = 8 u (H + (|y| + R)(G + T)) + (d + 8) (v (|y|^2 + 3 H) [l2 only] + v |y| G + 2^-123 (1 + |y| + G))
//   + 1.01 (R G + (|y| + R) T).
//
// The matrix units of GPUs take float16 (11 bits, unit roundoff 2^-11). Let the largest element of the
// codebook be below 2^15 and the length of the row in [2^14, 2^15), by powers of two, which are exact. Then
// an element of a row is y1 + y2 + y3 with |y1 - y| below 2^-11 |y| or 2^-25, the spacing of subnormals, and
// the same again for y2. For d <= 2^16 the 2^-25 sum to less than 2^-17, 2^-31 of the length of the row: in
// all |y - y1| < 1.01 2^-11 |y| and |y3| < 1.02 2^-22 |y|. The rests of the codewords are measured: T = max
// |b - b1|, L = max |b - b1 - b2|. Products are exact. These units align the terms of one operation to its
// largest term and cut off bits below the 24th (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor
// cores"). We assume this for every operation of 4 products or more and an accumulator: an operation of n
// products loses at most (n + 2) 2 u of its largest term. A chain of d then loses 3 d u of the sum of
// magnitudes. 5 (d + 16) leaves room for the float32 of the scores and the products of the small parts:
//   accumulated      5.05 (d + 16) u |y| (G + T)
//   one product      1.01 R G + 1.01 (|y| + R) T, with |y| + R for |y| in the line above;
//                    R = |y - y1|, measured or below 1.01 2^-11 |y|
//   three products   1.02 2^-22 |y| G + 1.01 |y| L + 1.02 2^-11 |y| (T + L)
// plus E of float32 for inputs, h_k and the definition. Rows shorter than 2^-60 of the codewords count as
// that long.
//
// The line "one product" only requires of a row that R is measured and no element of y1 overflows. So a
// search may scale all rows by one power of two that brings the longest below 2^15, or take float16 rows
// unchanged: short rows lose bits, and R includes them. The squares in R and |y| are exact or rounded once,
// except squares below 2^-126: these are at most d 2^-125 of the scaled row in sum, which is added. In
// float32, d sums of rounded squares are off by (d + 1) u, and the root by 2 u: both within the factor 1.01.
//
// A search may also store only the least score of several codewords, and score these again later in another
// order of the same products. Both scores are within E, so the rule holds for any two of them: if a score s
// of one codeword and a score t of another differ by more than 2 E, the order of the two in the definition is
// the order of s and t. A lower bound from the least score holds for each of the codewords, since none of
// their scores is below it.
//
// Where the least score is not certain, let third be the least score outside two sets of codewords. If third
// - best > 2 E, the winner of the definition is in one of the two sets, and the definition may decide among
// their codewords only.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define UEFL_HOST_DEVICE __host__ __device__
#else
#define UEFL_HOST_DEVICE
#endif

namespace uefl {

// Returns E, the bound for one float32 score. d is the number of elements, half_square is H, radius is G, and
// square is |y|^2 of the float32 y, rounded up. euclidean selects l2, otherwise cosine.
UEFL_HOST_DEVICE static inline double score_error(int64_t d, double half_square, double radius, double square,
                                                  bool euclidean) {
  const double norm = sqrt(square);
  const double magnitude = half_square + norm * radius;
  if (!(magnitude < 0x1p126) || !(norm < 0x1p126) || d > (1 << 16)) return INFINITY;
  const double far = euclidean ? 0x1p-53 * square : 0;
  return static_cast<double>(d + 8) * (1.01 * 0x1p-24 * magnitude + far + 0x1p-125 * (1 + norm + radius));
}

// Returns E for three bfloat16 products. rest_radius is T, and rest is R^2, rounded up. The other arguments
// are as for score_error().
UEFL_HOST_DEVICE static inline double score_error_bf16x3(int64_t d, double half_square, double radius,
                                                         double rest_radius, double square, double rest,
                                                         bool euclidean) {
  const double norm = sqrt(square), rest_norm = sqrt(rest);
  if (!(half_square + norm * radius < 0x1p126) || !(norm < 0x1p126) || d > (1 << 16)) return INFINITY;
  const double left_out = rest_norm * rest_radius + 0x1p-8 * (rest_norm * radius + norm * rest_radius);
  const double far = euclidean ? 0x1p-53 * (square + 3 * half_square) : 0;
  return static_cast<double>(d + 8) *
             (3.12 * 0x1p-24 * norm * radius + far + 0x1p-123 * (1 + norm + radius)) +
         3 * 0x1p-24 * half_square + 1.01 * left_out;
}

// Returns E for one bfloat16 product. The arguments are as for score_error_bf16x3().
UEFL_HOST_DEVICE static inline double score_error_bf16(int64_t d, double half_square, double radius,
                                                       double rest_radius, double square, double rest,
                                                       bool euclidean) {
  const double norm = sqrt(square), rest_norm = sqrt(rest);
  if (!(half_square + norm * radius < 0x1p126) || !(norm < 0x1p126) || d > (1 << 16)) return INFINITY;
  const double far = euclidean ? 0x1p-53 * (square + 3 * half_square) : 0;
  return static_cast<double>(d + 8) *
             (1.05 * 0x1p-24 * norm * radius + far + 0x1p-123 * (1 + norm + radius)) +
         3 * 0x1p-24 * half_square + 1.01 * (rest_norm * radius + norm * rest_radius);
}

// Returns E for 16-bit integers. The arguments are as for score_error_bf16x3().
UEFL_HOST_DEVICE static inline double score_error_i16(int64_t d, double half_square, double radius,
                                                      double rest_radius, double square, double rest,
                                                      bool euclidean) {
  const double norm = sqrt(square), rest_norm = sqrt(rest), rounded = norm + rest_norm;
  const double magnitude = half_square + rounded * (radius + rest_radius);
  if (!(magnitude < 0x1p126) || !(rounded < 0x1p126) || d > (1 << 16)) return INFINITY;
  const double far = euclidean ? 0x1p-53 * (square + 3 * half_square) : 0;
  return 8 * 0x1p-24 * magnitude +
         static_cast<double>(d + 8) * (far + 0x1p-53 * norm * radius + 0x1p-123 * (1 + norm + radius)) +
         1.01 * (rest_norm * radius + rounded * rest_radius);
}

// Returns the two parts of E that every float16 search on a GPU has: the float32 bound and the line
// "accumulated". norm is |y|, rounded up, and rest_radius is T.
UEFL_HOST_DEVICE static inline double score_error_fp16_sum(int64_t d, double half_square, double radius,
                                                           double rest_radius, double norm, bool euclidean) {
  return score_error(d, half_square, radius, norm * norm, euclidean) +
         5.05 * static_cast<double>(d + 16) * 0x1p-24 * norm * (radius + rest_radius);
}

// The factors of E for one float16 product: E = constant + norm |y| + square |y|^2 + rest R. The factor of R
// = |y - y1| is separate, because each row has its own R. In float32 the factors are within a thousandth of
// their float64 values.
template <class Real>
struct ErrorTermsOf {
  Real constant, norm, square, rest;
};
using ErrorTerms = ErrorTermsOf<double>;

template <class Real = double>
UEFL_HOST_DEVICE static inline ErrorTermsOf<Real> fp16_error(int64_t d,
                                                             std::type_identity_t<Real> half_square,
                                                             std::type_identity_t<Real> radius,
                                                             std::type_identity_t<Real> rest_radius,
                                                             bool euclidean) {
  const Real elements = static_cast<Real>(d + 8), rounding = elements * Real(1.01 * 0x1p-24),
             tiny = elements * Real(0x1p-125);
  const Real accumulated = static_cast<Real>(d + 16) * Real(5.05 * 0x1p-24) * (radius + rest_radius);
  if (d > (1 << 16)) return {Real(INFINITY), 0, 0, 0};
  return {rounding * half_square + tiny * (1 + radius),
          rounding * radius + tiny + accumulated + Real(1.01) * rest_radius,
          euclidean ? elements * Real(0x1p-53) : 0, accumulated + Real(1.01) * (radius + rest_radius)};
}

UEFL_HOST_DEVICE static inline double score_error_fp16x3(int64_t d, double half_square, double radius,
                                                         double rest_radius, double last_radius, double norm,
                                                         bool euclidean) {
  return score_error_fp16_sum(d, half_square, radius, rest_radius, norm, euclidean) +
         norm * (1.02 * 0x1p-22 * radius + 1.01 * last_radius + 1.02 * 0x1p-11 * (rest_radius + last_radius));
}

}  // namespace uefl
