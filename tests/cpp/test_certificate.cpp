// Compares the error bounds of common/certificate.h with the errors of real searches.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "check.h"
#include "common/certificate.h"
#include "cpu/vq_prefilter.h"

using namespace uefl::cpu;

static void measured_error_stays_below_the_bound() {
  std::mt19937 random(1);
  for (const int64_t d : {1, 2, 3, 16, 64, 513}) {
    for (const double offset : {0.0, 10.0, 1e3}) {
      for (const double scale : {1e-30, 1e-12, 1.0, 1e15}) {
        double worst = 0;
        for (int trial = 0; trial < 200; ++trial) {
          const auto x = normal<double>(d, random, offset * scale, scale),
                     c = normal<double>(d, random, offset * scale, scale);
          const float mean = static_cast<float>(offset * scale);
          double square = 0, radius_square = 0;
          long double exact = 0;
          for (int64_t j = 0; j < d; ++j) {
            const double y = static_cast<double>(static_cast<float>(x[j] - mean)),
                         b = c[j] - static_cast<double>(mean);
            square += y * y, radius_square += b * b;
            exact += static_cast<long double>(b) * b / 2 - (static_cast<long double>(x[j]) - mean) * b;
          }
          float score = static_cast<float>(
              radius_square /
              2);  // rounds products and sums separately, which gives the larger error of the two variants
          for (int64_t j = 0; j < d; ++j) {
            const volatile float product =
                static_cast<float>(x[j] - mean) * static_cast<float>(c[j] - static_cast<double>(mean));
            score = score - product;
          }
          const double bound =
              uefl::score_error(d, radius_square / 2, std::sqrt(radius_square), square, true);
          worst = std::max(worst, static_cast<double>(std::fabs(score - exact)) / bound);
        }
        CHECK(worst <= 1, "d %ld offset %g scale %g: error is %g of the bound", static_cast<long>(d), offset,
              scale, worst);
      }
    }
  }
}

// The output of a kernel for rows and codewords: the scores [rows][k], and the sizes for the bound.
struct Scored {
  std::vector<float> scores;
  std::vector<RowSize> size;
  double rest_radius;
};

struct RowsAndCodewords {
  int64_t n, k, d;
  std::vector<float> x, codewords, mean;  // codewords are centered
};

struct alignas(64) Line {
  char bytes[64];
};

static std::vector<Line> memory(int64_t bytes) { return std::vector<Line>(bytes / sizeof(Line)); }

static std::vector<const char*> rows_of(const RowsAndCodewords& of, int64_t room) {
  std::vector<const char*> source(room);
  for (int64_t r = 0; r < room; ++r)
    source[r] = reinterpret_cast<const char*>(&of.x[std::min(r, of.n - 1) * of.d]);
  return source;
}

// Scores one block of codewords. half_squares are infinity in the padding.
static Scored score(const VqAssignKernel& kernel, const RowsAndCodewords& of,
                    const std::vector<float>& half_squares, float) {
  auto block = memory(kernel.block_bytes(of.d)), y = memory(kernel.tile_bytes(kernel.rows, of.d));
  Scored out{{}, std::vector<RowSize>(kernel.rows), 0};
  for (int64_t k = 0; k < of.k; ++k)
    out.rest_radius = std::max(out.rest_radius, kernel.pack(&of.codewords[k * of.d], of.d, k, block.data()));
  kernel.load(rows_of(of, kernel.rows).data(), of.n, Dtype::f32, of.d, of.mean.data(), y.data(),
              out.size.data());
  std::vector<float> all(kernel.rows * kernel.block_codewords);
  kernel.scores(y.data(), of.n, block.data(), half_squares.data(), 1, of.d, all.data());
  for (int64_t r = 0; r < of.n; ++r)
    out.scores.insert(out.scores.end(), &all[r * kernel.block_codewords],
                      &all[r * kernel.block_codewords + of.k]);
  out.rest_radius = std::sqrt(out.rest_radius);
  return out;
}

static Scored score(const PrefilterKernel& kernel, const RowsAndCodewords& of,
                    const std::vector<float>& half_squares, float unit) {
  auto block = memory(kernel.block_bytes(of.d)), y = memory(kernel.tile_bytes(kernel.rows, of.d)),
       scratch = memory(kernel.scratch_bytes);
  Scored out{std::vector<float>(of.n * of.k, INFINITY), std::vector<RowSize>(kernel.rows), 0};
  for (int64_t k = 0; k < of.k; ++k) {
    out.rest_radius =
        std::max(out.rest_radius, kernel.pack(&of.codewords[k * of.d], of.d, unit, k, block.data()));
  }
  kernel.load(rows_of(of, kernel.rows).data(), of.n, Dtype::f32, of.d, of.mean.data(), y.data(),
              out.size.data());
  CandidateLists found;
  std::fill_n(found.margin, CandidateLists::kRows, 0x1p126f);  // with this margin, every codeword is listed
  kernel.candidates(y.data(), of.n, block.data(), half_squares.data(), 1, of.d, unit, {}, scratch.data(),
                    found);
  for (int64_t r = 0; r < of.n; ++r) {
    for (int i = 0; i < std::min(found.count[r], CandidateLists::kMost); ++i) {
      if (found.code[r][i] < of.k) out.scores[r * of.k + found.code[r][i]] = found.score[r][i];
    }
  }
  out.rest_radius = std::sqrt(out.rest_radius);
  return out;
}

static double bound_of(Arithmetic arithmetic, int64_t d, double half_square, double radius,
                       double rest_radius, const RowSize& row) {
  if (arithmetic == Arithmetic::f32) return uefl::score_error(d, half_square, radius, row.square, true);
  const auto bound = arithmetic == Arithmetic::bf16x3 ? uefl::score_error_bf16x3
                     : arithmetic == Arithmetic::bf16 ? uefl::score_error_bf16
                                                      : uefl::score_error_i16;
  return bound(d, half_square, radius, rest_radius, row.square, row.rest, true);
}

// Returns the squared error of rounding to bfloat16.
static double rest_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x8000) & 0xffff0000u;
  float nearest;
  std::memcpy(&nearest, &bits, sizeof nearest);
  return std::pow(double(value) - nearest, 2);
}

// Checks that the sizes from the kernel are upper bounds of the true sizes.
template <class Kernel>
static void check_sizes(const Kernel& kernel, const RowsAndCodewords& of, const Scored& scored) {
  const bool in_bfloat16 = kernel.arithmetic == Arithmetic::bf16 || kernel.arithmetic == Arithmetic::bf16x3;
  for (int64_t r = 0; r < of.n; ++r) {
    double square = 0, rest = 0;
    for (int64_t j = 0; j < of.d; ++j) {
      const float y = of.x[r * of.d + j] - of.mean[j];
      square += double(y) * y, rest += rest_of(y);
    }
    CHECK(scored.size[r].square >= square * (1 - 1e-12), "%g, not %g", scored.size[r].square, square);
    CHECK(!in_bfloat16 || scored.size[r].rest >= rest * (1 - 1e-12), "rest %g, not %g", scored.size[r].rest,
          rest);
  }
  for (int64_t k = 0; k < of.k && in_bfloat16; ++k) {
    double rest = 0;
    for (int64_t j = 0; j < of.d; ++j) rest += rest_of(of.codewords[k * of.d + j]);
    CHECK(scored.rest_radius >= std::sqrt(rest) * (1 - 1e-12), "rest %g, not %g", scored.rest_radius,
          std::sqrt(rest));
  }
}

static float largest(const float* values, int64_t d) {
  float most = 0;
  for (int64_t j = 0; j < d; ++j) most = std::max(most, std::fabs(values[j]));
  return most;
}

// Returns the largest error of a score, relative to the bound from the sizes of the kernel.
template <class Kernel>
static double worst_of(const Kernel& kernel, const RowsAndCodewords& of) {
  double half_square = 0;
  float most = 0;
  std::vector<double> half(of.k);
  std::vector<float> half_squares(kernel.block_codewords, INFINITY);
  for (int64_t k = 0; k < of.k; ++k) {
    for (int64_t j = 0; j < of.d; ++j)
      half[k] += double(of.codewords[k * of.d + j]) * of.codewords[k * of.d + j] / 2;
    half_squares[k] = static_cast<float>(half[k]);
    half_square = std::max(half_square, half[k]),
    most = std::max(most, largest(&of.codewords[k * of.d], of.d));
  }
  const double radius = std::sqrt(2 * half_square);
  const Scored scored = score(kernel, of, half_squares, fixed_unit(static_cast<float>(radius), most));
  check_sizes(kernel, of, scored);
  double worst = 0;
  for (int64_t r = 0; r < of.n; ++r) {
    const double bound =
        bound_of(kernel.arithmetic, of.d, half_square, radius, scored.rest_radius, scored.size[r]);
    CHECK(bound > 0, "a bound of %g", bound);  // false for NaN
    if (bound == INFINITY) continue;           // the definition evaluates such a row
    for (int64_t k = 0; k < of.k; ++k) {
      long double exact = half[k];
      for (int64_t j = 0; j < of.d; ++j) {
        exact -= (static_cast<long double>(of.x[r * of.d + j]) - of.mean[j]) * of.codewords[k * of.d + j];
      }
      const double share = static_cast<double>(std::fabs(scored.scores[r * of.k + k] - exact)) / bound;
      worst = share <= worst ? worst : share;
    }
  }
  return worst;
}

template <class Kernel>
static void a_kernel_keeps_its_bound(const char* name, const Kernel& kernel) {
  std::mt19937 random(2);
  const int64_t n = std::min(kernel.rows, 4), k = 4;
  for (const int64_t d : {1, 2, 16, 33, 64, 130, 513, 600}) {
    const auto mean = normal<float>(d, random);
    for (const double x_scale : {1e-30, 1e-12, 1.0, 1e15, 1e30}) {
      for (const double code_scale : {1e-30, 1e-12, 1.0, 1e15}) {
        for (const float outlier : {1.0f, 1e4f}) {
          RowsAndCodewords of{n,
                              k,
                              d,
                              normal<float>(n * d, random, 0, x_scale),
                              normal<float>(k * d, random, 0, code_scale),
                              mean};
          for (int64_t r = 0; r < n; ++r) of.x[r * d] *= outlier;
          const double worst = worst_of(kernel, of);
          CHECK(worst <= 1, "%s, d %ld, scales %g and %g: error is %g of the bound", name, long{d}, x_scale,
                code_scale, worst);
        }
      }
    }
  }
}

// Only one element has a rest, which the prefilter drops and which is multiplied by one. The error then
// reaches the bound, and a size without this element breaks it.
static void every_element_counts(const char* name, const PrefilterKernel& kernel) {
  for (const int64_t d : {1, 2, 70, 530}) {
    const std::vector<float> mean(d);
    for (int64_t j = 0; j < d; ++j) {
      std::vector<float> vector(d), one(d);
      vector[(j + 1) % d] = one[j] = 1;
      const bool half_units = kernel.arithmetic == Arithmetic::i16 && d > 1;
      vector[j] = half_units ? 100.5f * fixed_unit(1, 1) : 1 + 0x1p-8f;  // half-way between two bfloat16
      const double of_row = worst_of(kernel, {1, 1, d, vector, one, mean}),
                   of_code = worst_of(kernel, {1, 1, d, one, vector, mean});
      CHECK(of_row <= 1 && of_code <= 1, "%s, d %ld, %ld: error is %g and %g of the bound", name, long{d},
            long{j}, of_row, of_code);
      if (kernel.arithmetic == Arithmetic::i16 && d == 1) continue;  // there is almost no rest
      CHECK(of_row > 0.8 && of_code > 0.8,
            "%s, d %ld, %ld: the bound is far from the error, which is %g and %g of it", name, long{d},
            long{j}, of_row, of_code);
    }
  }
}

// Returns the largest sum of integer products, of either sign: both vectors have one direction, or one
// element.
template <class Kernel>
static void sums_do_not_overflow(const char* name, const Kernel& kernel) {
  for (const int64_t d : {1, 2, 3, 64947, 1 << 16}) {
    for (const bool even : {true, false}) {
      RowsAndCodewords of{
          2, 2, d, std::vector<float>(2 * d), std::vector<float>(2 * d), std::vector<float>(d)};
      for (int64_t j = 0; j < (even ? d : 1); ++j) {
        of.x[j] = of.codewords[j] = 1;
        of.x[d + j] = of.codewords[d + j] = -1;
      }
      const double worst = worst_of(kernel, of);
      CHECK(worst <= 1, "%s, d %ld: error is %g of the bound", name, long{d}, worst);
    }
  }
}

template <class Kernel>
static void check_kernel(const char* name, const Kernel& kernel) {
  a_kernel_keeps_its_bound(name, kernel);
  sums_do_not_overflow(name, kernel);
  if constexpr (std::is_same_v<Kernel, PrefilterKernel>) every_element_counts(name, kernel);
}

// Checks that the search packs, multiplies and measures rows and codewords in every arithmetic of this CPU.
static void every_kernel_keeps_its_bound() {
  check_kernel("portable", vq_assign_portable);
#if defined(__x86_64__)
  check_kernel("portable, first phase", vq_prefilter_portable);
  if (isa() >= Isa::avx2) check_kernel("avx2, first phase", vq_prefilter_avx2);
  if (isa() >= Isa::avx2) check_kernel("avx2", vq_assign_avx2);
  if (isa() >= Isa::avx512) check_kernel("avx512", vq_assign_avx512);
  if (isa() >= Isa::avx512vnni) check_kernel("avx512vnni, first phase", vq_prefilter_avx512vnni);
  if (isa() >= Isa::amx) check_kernel("amx, first phase", vq_prefilter_amx);
  if (isa() >= Isa::amx) check_kernel("amx", vq_assign_amx);
  if (isa() >= Isa::amx) check_kernel("amx, small K", vq_assign_small_k_amx);
#endif
}

// Returns the float16 nearest to a value below 2^16.
static float float16(double value) {
  const double spacing = std::ldexp(1.0, std::max(std::ilogb(value == 0 ? 1e-30 : value), -14) - 10);
  return static_cast<float>(std::nearbyint(value / spacing) * spacing);
}

// Runs one operation of a matrix unit that keeps 24 bits below the largest term, and cuts off the rest of
// every term and of their sum.
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
          double square = 0, radius_square = 0, rest = 0, last = 0, lacking = 0;
          for (int64_t j = 0; j < d; ++j) square += double(y[j]) * y[j], radius_square += double(b[j]) * b[j];
          const double up = std::ldexp(1.0, 14 - std::ilogb(std::sqrt(square))), code_up = 0x1p11;
          std::vector<float> y1, y2, b1, b2;
          long double exact = radius_square / 2;
          for (int64_t j = 0; j < d; ++j) {
            y1.push_back(float16(y[j] * up)), y2.push_back(float16(y[j] * up - y1[j]));
            b1.push_back(float16(b[j] * code_up)), b2.push_back(float16(b[j] * code_up - b1[j]));
            lacking += std::pow(y[j] - y1[j] / up, 2);
            rest += std::pow(b[j] - b1[j] / code_up, 2),
                last += std::pow(b[j] - (double(b1[j]) + b2[j]) / code_up, 2);
            exact -= static_cast<long double>(y[j]) * b[j];
          }
          float one = 0, three = 0;
          for (int64_t j = 0; j < d; j += step)
            three = multiply_add(&y2[j], &b1[j], std::min(step, d - j), three);
          for (int64_t j = 0; j < d; j += step)
            three = multiply_add(&y1[j], &b2[j], std::min(step, d - j), three);
          for (int64_t j = 0; j < d; j += step)
            three = multiply_add(&y1[j], &b1[j], std::min(step, d - j), three);
          for (int64_t j = 0; j < d; j += step)
            one = multiply_add(&y1[j], &b1[j], std::min(step, d - j), one);
          const float h = static_cast<float>(radius_square / 2),
                      down = static_cast<float>(1 / (up * code_up));
          const double radius = std::sqrt(radius_square), norm = std::sqrt(square);
          const double error1 = std::fabs(std::fma(-one, down, h) - exact),
                       error3 = std::fabs(std::fma(-three, down, h) - exact);
          const uefl::ErrorTerms terms = uefl::fp16_error(d, h, radius, std::sqrt(rest), true);
          const double bound1 = terms.constant + terms.norm * norm + terms.square * norm * norm +
                                terms.rest * std::sqrt(lacking);
          worst1 = std::max(worst1, error1 / bound1);
          worst3 = std::max(worst3, error3 / uefl::score_error_fp16x3(d, h, radius, std::sqrt(rest),
                                                                      std::sqrt(last), norm, true));
        }
        CHECK(worst1 <= 1 && worst3 <= 1, "d %ld scale %g: %g and %g of the bound", static_cast<long>(d),
              scale, worst1, worst3);
        CHECK(d > 1 || scale < 1 || worst1 > 0.3,
              "one element: the bound of one product is nearly reached, not %g", worst1);
      }
    }
  }
}

static void bound_is_useful_and_safe_at_the_edges() {
  const double infinity = std::numeric_limits<double>::infinity(),
               nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(uefl::score_error(64, 32, 8, 64, true) < 1e-3, "unit-scale data must mostly be certified");
  CHECK(uefl::score_error(8, 0, 0, 0, true) > 0, "ties at zero must not be certified");
  CHECK(uefl::score_error(8, 1, 1, infinity, true) == infinity, "an infinite row");
  CHECK(uefl::score_error(8, 1, 1, nan, true) == infinity, "a NaN row");
  CHECK(uefl::score_error(8, nan, 1, 1, true) == infinity, "a mean that overflowed");
  CHECK(uefl::score_error(8, 1e38, 1e19, 1e38, true) == infinity, "sums that may overflow float32");
  CHECK(uefl::score_error((1 << 16) + 1, 1, 1, 1, true) == infinity, "a chain too long for the bound");
  CHECK(uefl::score_error(8, 0, 1, 1e80, true) == infinity, "a row far beyond float32");
  CHECK(uefl::score_error(4, 1, 1, 1e30, true) > 0x1p-53 * 1e30,
        "far rows are limited by the float64 definition itself");
}

void run() {
  measured_error_stays_below_the_bound();
  every_kernel_keeps_its_bound();
  measured_error_of_float16_stays_below_the_bound();
  bound_is_useful_and_safe_at_the_edges();
}
