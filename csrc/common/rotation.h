// The rotation trick (Fifty et al. 2024, section 4.2). The backward pass treats the codeword q of an input x
// as lambda R x, with constants lambda = |q| / |x| and R. R rotates the direction of x to the direction of q.
// Let u and v be the unit vectors of x and q, and w the unit vector of u + v. Then
//   R = 1 - 2 w w^T + 2 v u^T,
// and the gradient g of q gives the gradient of x
//   lambda R^T g = lambda (g - 2 w (w.g) + 2 u (v.g)).
// This is a linear combination of g, x and q. Its factors follow from five dot products.
#pragma once

#include <cmath>

#include "common/certificate.h"

namespace uefl {

struct RotationDots {
  double xx, qq, xq, xg, qg;  // x.x, q.q, x.q, x.g, q.g
};

struct Rotation {
  double scale, along, towards;  // lambda R^T g = scale g + along x + towards q
};

UEFL_HOST_DEVICE static inline Rotation rotation(const RotationDots& dots) {
  constexpr double kEps = 1e-6;  // replaces smaller norms, as in the published code
  const double x_norm = sqrt(dots.xx), q_norm = sqrt(dots.qq);
  const double x_scale = 1 / (x_norm > kEps ? x_norm : kEps), q_scale = 1 / (q_norm > kEps ? q_norm : kEps);
  const double sum_g = dots.xg * x_scale + dots.qg * q_scale;  // (u + v).g
  const double sum_sum = dots.xx * x_scale * x_scale + 2 * dots.xq * x_scale * q_scale +
                         dots.qq * q_scale * q_scale;  // |u + v|^2
  const double lambda = q_norm * x_scale, mirror = sum_g / (sum_sum > kEps * kEps ? sum_sum : kEps * kEps);
  return {lambda, 2 * lambda * x_scale * (dots.qg * q_scale - mirror), -2 * lambda * q_scale * mirror};
}

}  // namespace uefl
