// The error bound of common/certificate.h against the error that a float32 search really makes.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "common/certificate.h"

static void measured_error_stays_below_the_bound() {
  std::mt19937 random(1);
  for (const int64_t d : {1, 2, 3, 16, 64, 513}) {
    for (const double offset : {0.0, 10.0, 1e3}) {
      for (const double scale : {1e-30, 1e-12, 1.0, 1e15}) {
        double worst = 0;
        for (int trial = 0; trial < 200; ++trial) {
          const auto x = normal<double>(d, random, offset * scale, scale), c = normal<double>(d, random, offset * scale, scale);
          const float mean = static_cast<float>(offset * scale);
          double square = 0, radius_square = 0;
          long double exact = 0;
          for (int64_t j = 0; j < d; ++j) {
            const double y = static_cast<double>(static_cast<float>(x[j] - mean)), b = c[j] - static_cast<double>(mean);
            square += y * y, radius_square += b * b;
            exact += static_cast<long double>(b) * b / 2 - (static_cast<long double>(x[j]) - mean) * b;
          }
          float score = static_cast<float>(radius_square / 2);  // products and sums rounded apart: the larger error of the two variants
          for (int64_t j = 0; j < d; ++j) {
            const volatile float product = static_cast<float>(x[j] - mean) * static_cast<float>(c[j] - static_cast<double>(mean));
            score = score - product;
          }
          const double bound = uefl::score_error(d, radius_square / 2, std::sqrt(radius_square), square, true);
          worst = std::max(worst, static_cast<double>(std::fabs(score - exact)) / bound);
        }
        CHECK(worst <= 1, "d %ld offset %g scale %g: error is %g of the bound", static_cast<long>(d), offset, scale, worst);
      }
    }
  }
}

static void bound_is_useful_and_safe_at_the_edges() {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(uefl::score_error(64, 32, 8, 64, true) < 1e-3, "unit-scale data must mostly be certified");
  CHECK(uefl::score_error(8, 0, 0, 0, true) > 0, "ties at zero must not be certified");
  CHECK(uefl::score_error(8, 1, 1, infinity, true) == infinity, "an infinite row");
  CHECK(uefl::score_error(8, 1, 1, nan, true) == infinity, "a NaN row");
  CHECK(uefl::score_error(8, nan, 1, 1, true) == infinity, "a mean that overflowed");
  CHECK(uefl::score_error(8, 1e38, 1e19, 1e38, true) == infinity, "sums that may overflow float32");
  CHECK(uefl::score_error((1 << 16) + 1, 1, 1, 1, true) == infinity, "a chain too long for the bound");
  CHECK(uefl::score_error(8, 0, 1, 1e80, true) == infinity, "a row far beyond float32");
  CHECK(uefl::score_error(4, 1, 1, 1e30, true) > 0x1p-53 * 1e30, "far rows are limited by the float64 definition itself");
}

void run() {
  measured_error_stays_below_the_bound();
  bound_is_useful_and_safe_at_the_edges();
}
