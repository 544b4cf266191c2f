// When is the winner of a float32 search certainly the winner of the float64 definition?
//
// Notation: u = 2^-24, v = 2^-53. For one row x and codewords c_k, with a centre mu of our choice (0 for cosine):
//   y = x - mu, b_k = c_k - mu,   score_k = h_k - y.b_k,   h_k = |b_k|^2 / 2 for l2 and 0 for cosine.
// In real numbers score_k differs from |x - c_k|^2 / 2 (l2) or from -x.c_k (cosine) by a term without k, so the order is the same.
// H = max h_k, G = max |b_k|. What is computed differs from the real score_k by at most
//   chain        d FMAs, or d products and d differences:      (d + 1) u (H + |y| G) / (1 - (d + 1) u)
//   inputs       y and b_k each rounded once to float32:       (2 u + u^2) |y| G
//   h_k          summed in float64, rounded once:              (u + (d + 3) v) H
//   underflow    per operation or input, even flushed to zero: 2^-126, times 1, |y| or G
// and the float64 definition differs from its own real value by at most
//   l2           (d + 3) v |x - c_k|^2 / 2 <= (d + 3) v (|y|^2 + 2 H)
//   cosine       (d + 2) v |y| G
// For d <= 2^16 the quotient is below 1.005, and all terms in v but (d + 3) v |y|^2 vanish in what (d + 8) leaves over (d + 3):
//   E = (d + 8) (1.01 u (H + |y| G) + v |y|^2 [l2 only] + 2^-125 (1 + |y| + G)).
// If second - best > 2 E, every other codeword is strictly worse in the float64 definition. Otherwise the winner is among the
// codewords whose score is at most best + 2 E. A row, or a codebook, that is not finite or may overflow gets E = infinity.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define UEFL_HOST_DEVICE __host__ __device__
#else
#define UEFL_HOST_DEVICE
#endif

namespace uefl {

// d: elements; half_square: H; radius: G; square: |y|^2 in float64 of the float32 y; euclidean: l2, not cosine. Returns E.
UEFL_HOST_DEVICE static inline double score_error(int64_t d, double half_square, double radius, double square, bool euclidean) {
  const double norm = sqrt(square);
  const double magnitude = half_square + norm * radius;
  if (!(magnitude < 0x1p126) || !(norm < 0x1p126) || d > (1 << 16)) return INFINITY;
  const double far = euclidean ? 0x1p-53 * square : 0;
  return static_cast<double>(d + 8) * (1.01 * 0x1p-24 * magnitude + far + 0x1p-125 * (1 + norm + radius));
}

}  // namespace uefl
