// The error bound of common/certificate.h against the error that a float32 search really makes.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "common/certificate.h"
#include "cpu/vq_assign_coarse.h"

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

// The bfloat16 nearest to a value.
static float bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The largest error of a score among random vectors, as a share of its bound, with the products of high and low parts or without.
static double worst_of_bfloat16(std::mt19937& random, int64_t d, double scale, bool low_parts) {
  double worst = 0;
  for (int trial = 0; trial < 500; ++trial) {
    const auto y = normal<float>(d, random, 0, scale), b = normal<float>(d, random, 0, scale);
    double square = 0, radius_square = 0, rest = 0, rest_radius = 0;
    long double exact = 0;
    float sum = 0;
    for (int64_t j = 0; j < d; ++j) {
      const float y1 = bfloat16(y[j]), b1 = bfloat16(b[j]);
      square += double(y[j]) * y[j], radius_square += double(b[j]) * b[j];
      rest += double(y[j] - y1) * (y[j] - y1), rest_radius += double(b[j] - b1) * (b[j] - b1);
      exact -= static_cast<long double>(y[j]) * b[j];
      if (low_parts) sum += bfloat16(y[j] - y1) * b1;
      sum += y1 * b1;
      if (low_parts) sum += y1 * bfloat16(b[j] - b1);
    }
    const double half_square = radius_square / 2, radius = std::sqrt(radius_square), rest_norm = std::sqrt(rest_radius);
    const float h = static_cast<float>(half_square);
    exact += half_square;
    const double bound = low_parts ? uefl::score_error_bf16x3(d, half_square, radius, rest_norm, square, rest, true)
                                   : uefl::score_error_bf16(d, half_square, radius, rest_norm, square, rest, true);
    worst = std::max(worst, static_cast<double>(std::fabs(h - sum - exact)) / bound);
  }
  return worst;
}

static void measured_error_of_bfloat16_stays_below_the_bound() {
  std::mt19937 random(2);
  for (const int64_t d : {1, 2, 16, 64, 513}) {
    for (const double scale : {1e-12, 1.0, 1e15}) {
      const double worst = worst_of_bfloat16(random, d, scale, true);
      CHECK(worst <= 1, "d %ld scale %g: error is %g of the bound", static_cast<long>(d), scale, worst);
      CHECK(d > 1 || worst > 0.1, "one element: the bound is of the size of the error, not %g of it", worst);
    }
  }
}

static void measured_error_of_one_bfloat16_product_stays_below_the_bound() {
  std::mt19937 random(4);
  for (const int64_t d : {1, 2, 16, 64, 513}) {
    for (const double scale : {1e-12, 1.0, 1e15}) {
      const double worst = worst_of_bfloat16(random, d, scale, false);
      CHECK(worst <= 1, "d %ld scale %g: error is %g of the bound", static_cast<long>(d), scale, worst);
      CHECK(d > 1 || worst > 0.5, "one element: the bound is nearly reached, not %g of it", worst);
    }
  }
}

static void measured_error_of_integers_stays_below_the_bound() {
  std::mt19937 random(5);
  for (const int64_t d : {1, 2, 16, 64, 513}) {
    for (const double scale : {1e-30, 1e-12, 1.0, 1e15}) {
      for (const double outlier : {1.0, 1e4}) {
        double worst = 0;
        for (int trial = 0; trial < 300; ++trial) {
          auto y = normal<float>(d, random, 0, scale), b = normal<float>(d, random, 0, scale);
          y[0] *= static_cast<float>(outlier);
          double square = 0, radius_square = 0, rest = 0, rest_radius = 0;
          float y_most = 0, b_most = 0;
          for (int64_t j = 0; j < d; ++j) {
            square += double(y[j]) * y[j], radius_square += double(b[j]) * b[j];
            y_most = std::max(y_most, std::fabs(y[j])), b_most = std::max(b_most, std::fabs(b[j]));
          }
          const float y_unit = uefl::cpu::fixed_unit(static_cast<float>(std::sqrt(square)), y_most);
          const float b_unit = uefl::cpu::fixed_unit(static_cast<float>(std::sqrt(radius_square)), b_most);
          int64_t sum = 0, most = 0;
          long double exact = radius_square / 2;
          for (int64_t j = 0; j < d; ++j) {
            const int64_t q = std::lrint(y[j] * (1 / y_unit)), p = std::lrint(b[j] * (1 / b_unit));
            sum += q * p, most = std::max({most, std::abs(q), std::abs(p)});
            rest += std::pow(y[j] - double(q) * y_unit, 2), rest_radius += std::pow(b[j] - double(p) * b_unit, 2);
            exact -= static_cast<long double>(y[j]) * b[j];
          }
          CHECK(most <= 32767 && std::abs(sum) < int64_t{1} << 31, "d %ld: %ld, %ld", long{d}, long{most}, long{sum});
          const float h = static_cast<float>(radius_square / 2), score = std::fma(-static_cast<float>(sum), y_unit * b_unit, h);
          const double bound =
              uefl::score_error_i16(d, radius_square / 2, std::sqrt(radius_square), std::sqrt(rest_radius), square, rest, true);
          worst = std::max(worst, static_cast<double>(std::fabs(score - exact)) / bound);
        }
        CHECK(worst <= 1, "d %ld scale %g: error is %g of the bound", static_cast<long>(d), scale, worst);
      }
    }
  }
  // The most that a sum can come to: all of both vectors in one direction, or in a few elements.
  for (const int64_t d : {1, 2, 3, 1 << 16}) {
    const float norm = 1, element = 1 / std::sqrt(static_cast<float>(d)), unit = uefl::cpu::fixed_unit(norm, element);
    const int64_t q = std::lrint(element / unit) + (d > 2);
    CHECK(q <= 32767 && q * q * d < int64_t{1} << 31, "d %ld: %ld units an element", long{d}, long{q});
  }
}

// The float16 nearest to a value below 2^16.
static float float16(double value) {
  const double spacing = std::ldexp(1.0, std::max(std::ilogb(value == 0 ? 1e-30 : value), -14) - 10);
  return static_cast<float>(std::nearbyint(value / spacing) * spacing);
}

// One operation of a matrix unit that keeps 24 bits below the largest term and cuts off the rest of every term and of their sum.
static float multiply_add(const float* a, const float* b, int64_t n, float sum) {
  double largest = std::fabs(sum);
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(double(a[i]) * b[i]));
  if (largest == 0) return sum;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
  double total = std::trunc(sum / unit);
  for (int64_t i = 0; i < n; ++i) total += std::trunc(double(a[i]) * b[i] / unit);
  total *= unit;
  const double last = std::ldexp(1.0, std::ilogb(total == 0 ? 1.0 : total) - 23);
  return static_cast<float>(std::trunc(total / last) * last);
}

static void measured_error_of_float16_stays_below_the_bound() {
  std::mt19937 random(3);
  for (const int64_t d : {1, 2, 16, 64, 513}) {
    for (const double scale : {1.0, 1e-12, 1e12}) {
      for (const int64_t step : {4, 8, 16}) {
        double worst1 = 0, worst3 = 0;
        for (int trial = 0; trial < 100; ++trial) {
          const auto y = normal<float>(d, random, 0, scale), b = normal<float>(d, random);
          double square = 0, radius_square = 0, rest = 0, last = 0;
          for (int64_t j = 0; j < d; ++j) square += double(y[j]) * y[j], radius_square += double(b[j]) * b[j];
          const double up = std::ldexp(1.0, 14 - std::ilogb(std::sqrt(square))), code_up = 0x1p11;
          std::vector<float> y1, y2, b1, b2;
          long double exact = radius_square / 2;
          for (int64_t j = 0; j < d; ++j) {
            y1.push_back(float16(y[j] * up)), y2.push_back(float16(y[j] * up - y1[j]));
            b1.push_back(float16(b[j] * code_up)), b2.push_back(float16(b[j] * code_up - b1[j]));
            rest += std::pow(b[j] - b1[j] / code_up, 2), last += std::pow(b[j] - (double(b1[j]) + b2[j]) / code_up, 2);
            exact -= static_cast<long double>(y[j]) * b[j];
          }
          float one = 0, three = 0;
          for (int64_t j = 0; j < d; j += step) three = multiply_add(&y2[j], &b1[j], std::min(step, d - j), three);
          for (int64_t j = 0; j < d; j += step) three = multiply_add(&y1[j], &b2[j], std::min(step, d - j), three);
          for (int64_t j = 0; j < d; j += step) three = multiply_add(&y1[j], &b1[j], std::min(step, d - j), three);
          for (int64_t j = 0; j < d; j += step) one = multiply_add(&y1[j], &b1[j], std::min(step, d - j), one);
          const float h = static_cast<float>(radius_square / 2), down = static_cast<float>(1 / (up * code_up));
          const double radius = std::sqrt(radius_square), norm = std::sqrt(square);
          const double error1 = std::fabs(std::fma(-one, down, h) - exact), error3 = std::fabs(std::fma(-three, down, h) - exact);
          worst1 = std::max(worst1, error1 / uefl::score_error_fp16(d, h, radius, std::sqrt(rest), norm, true));
          worst3 = std::max(worst3, error3 / uefl::score_error_fp16x3(d, h, radius, std::sqrt(rest), std::sqrt(last), norm, true));
        }
        CHECK(worst1 <= 1 && worst3 <= 1, "d %ld scale %g: %g and %g of the bound", static_cast<long>(d), scale, worst1, worst3);
        CHECK(d > 1 || scale < 1 || worst1 > 0.3, "one element: the bound of one product is nearly reached, not %g", worst1);
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
  measured_error_of_bfloat16_stays_below_the_bound();
  measured_error_of_one_bfloat16_product_stays_below_the_bound();
  measured_error_of_integers_stays_below_the_bound();
  measured_error_of_float16_stays_below_the_bound();
  bound_is_useful_and_safe_at_the_edges();
}
