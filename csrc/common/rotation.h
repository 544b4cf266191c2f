// The rotation trick (Fifty et al. 2024, section 4.2): the backward pass differentiates q as lambda R x,
// where lambda = |q| / |x| and R rotates the direction of x to the direction of q; both are constants. With u
// and v the unit vectors of x and q, and w the unit vector of u + v,
//   R = 1 - 2 w w^T + 2 v u^T,   lambda R^T g = lambda (g - 2 w (w.g) + 2 u (v.g)),
// a combination of g, x and q with factors that need five dot products.
#pragma once

#include <cmath>

#include "common/certificate.h"

namespace uefl {

struct RotationDots {
  double xx, qq, xq, xg, qg;
};

struct Rotation {
  double scale, along, towards;  // lambda R^T g = scale g + along x + towards q
};

UEFL_HOST_DEVICE static inline Rotation rotation(const RotationDots& dots) {
  constexpr double kEps = 1e-6;  // smaller norms count as this, as in the published code
  const double x_norm = sqrt(dots.xx), q_norm = sqrt(dots.qq);
  const double x_scale = 1 / (x_norm > kEps ? x_norm : kEps), q_scale = 1 / (q_norm > kEps ? q_norm : kEps);
  const double sum_g = dots.xg * x_scale + dots.qg * q_scale;  // (u + v).g
  const double sum_sum = dots.xx * x_scale * x_scale + 2 * dots.xq * x_scale * q_scale +
                         dots.qq * q_scale * q_scale;  // |u + v|^2
  const double lambda = q_norm * x_scale, mirror = sum_g / (sum_sum > kEps * kEps ? sum_sum : kEps * kEps);
  return {lambda, 2 * lambda * x_scale * (dots.qg * q_scale - mirror), -2 * lambda * q_scale * mirror};
}

}  // namespace uefl
