// Compares linear with float64, row by row and unit by unit, within the rounding of a float32 product.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/linear.h"

using namespace uefl::cpu;

static double worst;

// Computes the product in shares of tasks, the last one first.
static std::vector<float> product(const std::vector<float>& x, const std::vector<float>& weight,
                                  const std::vector<float>& bias, int64_t inputs, int64_t rows,
                                  int64_t share) {
  const int64_t outputs = static_cast<int64_t>(bias.size());
  std::vector<float> y(rows * outputs + 16, 7);  // the last elements reveal writes past the end
  linear({x.data(), weight.data(), bias.data(), y.data(), rows, inputs, outputs},
         [&](int64_t count, const auto& work) {
           for (int64_t lo = (count - 1) / share * share; lo >= 0; lo -= share)
             work(lo, std::min(count, lo + share));
         });
  for (int64_t i = 0; i < 16; ++i)
    CHECK(y[rows * outputs + i] == 7, "%lld elements beyond the end", static_cast<long long>(i));
  y.resize(rows * outputs);
  return y;
}

static void near(const std::vector<float>& found, const std::vector<float>& x,
                 const std::vector<float>& weight, const std::vector<float>& bias, int64_t inputs) {
  const int64_t outputs = static_cast<int64_t>(bias.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / outputs, unit = static_cast<int64_t>(i) % outputs;
    double sum = bias[unit], size = std::fabs(sum), x_most = 0, weight_most = 0;
    for (int64_t j = 0; j < inputs; ++j) {
      const double a = x[row * inputs + j], b = weight[unit * inputs + j];
      sum += a * b, size += std::fabs(a * b), x_most = std::max(x_most, std::fabs(a)),
                                              weight_most = std::max(weight_most, std::fabs(b));
    }
    if (!(std::fabs(static_cast<float>(sum)) < INFINITY)) {
      CHECK(std::isnan(sum) ? std::isnan(found[i]) : found[i] == static_cast<float>(sum),
            "%.9g, expected %.9g", found[i], sum);
      continue;
    }
    // The error bound. AMX has one rounding of the sum for each pair of inputs and part, the three products
    // that are left out, and the subnormal numbers. float32 has at most two roundings for each input.
    const double allowed = size * 0x1p-24 * (3 + 3.0 * static_cast<double>(std::min<int64_t>(inputs, 512))) +
                           0x1p-46 * x_most * weight_most;
    const double error = std::fabs(found[i] - sum);
    if (size > 0) worst = std::max(worst, error / size);
    CHECK(error <= allowed, "[%lld, %lld] of %lld inputs: %.9g, expected %.9g", static_cast<long long>(row),
          static_cast<long long>(unit), static_cast<long long>(inputs), found[i], sum);
  }
}

static void sizes(int64_t rows, int64_t inputs, int64_t outputs) {
  std::mt19937 random(static_cast<unsigned>(rows * 10007 + inputs * 101 + outputs));
  const auto x = normal<float>(rows * inputs, random), weight = normal<float>(outputs * inputs, random),
             bias = normal<float>(outputs, random);
  const auto whole = product(x, weight, bias, inputs, rows, 1000);
  near(whole, x, weight, bias, inputs);
  for (const int64_t share : {1, 3})
    CHECK(product(x, weight, bias, inputs, rows, share) == whole, "in shares of %lld pieces",
          static_cast<long long>(share));
}

// Checks sizes at the limits of AMX, and values so small that their parts are subnormal.
static void ends(int64_t inputs) {
  std::mt19937 random(1);
  const int64_t rows = 40, outputs = 37;
  const float sizes[] = {0, 0x1p-38f, 1e-6f, 1e6f, 0x1p36f};
  auto x = normal<float>(rows * inputs, random), weight = normal<float>(outputs * inputs, random);
  for (int64_t i = 0; i < rows * inputs; ++i)
    x[i] *= sizes[i / inputs % 5] * (random() % 4 && inputs > 9 ? 1 : 0x1p-80f + (i % inputs == 0));
  for (int64_t i = 0; i < outputs * inputs; ++i) weight[i] *= sizes[i / inputs % 5];
  for (int64_t row = 0; row < rows; ++row) x[row * inputs] = sizes[row % 5];
  for (int64_t unit = 0; unit < outputs; ++unit) weight[unit * inputs] = sizes[unit % 5];
  near(product(x, weight, std::vector<float>(outputs), inputs, rows, 2), x, weight,
       std::vector<float>(outputs), inputs);
}

// Values that three bfloat16 do not hold also give correct results, in any place.
static void beyond(int64_t inputs, int64_t at) {
  const int64_t rows = 40, outputs = 37;
  std::mt19937 random(1);
  const auto x = normal<float>(rows * inputs, random), weight = normal<float>(outputs * inputs, random),
             bias = normal<float>(outputs, random);
  for (const float value : {0x1p40f, -3e38f, INFINITY, -INFINITY, NAN, 0x1p-41f, 1e-45f}) {
    auto odd_x = x, odd_weight = weight;
    if (std::fabs(value) < 1) {  // the largest value of all
      std::fill_n(odd_x.begin() + at / inputs * inputs, inputs, 0.0f);
      std::fill_n(odd_weight.begin() + at / inputs * inputs, inputs, 0.0f);
    }
    odd_x[at] = odd_weight[at] = value;
    near(product(odd_x, weight, bias, inputs, rows, 2), odd_x, weight, bias, inputs);
    near(product(x, odd_weight, bias, inputs, rows, 2), x, odd_weight, bias, inputs);
    near(product(odd_x, odd_weight, bias, inputs, rows, 2), odd_x, odd_weight, bias, inputs);
  }
}

void run() {
  for (const int64_t inputs : {1, 2, 3, 31, 32, 33, 511, 512, 513, 1100}) {
    for (const int64_t outputs : {1, 15, 16, 17, 32, 65}) {
      for (const int64_t rows : {1, 16, 33, 130, 300}) sizes(rows, inputs, outputs);
    }
  }
  sizes(520, 260, 530);                // several groups of units
  for (const int64_t rows : {0, 5}) {  // without inputs, and without rows or units
    const std::vector<float> bias{1, 2, 3};
    const auto found = product({}, {}, bias, 0, rows, 1);
    for (size_t i = 0; i < found.size(); ++i) CHECK(found[i] == bias[i % 3], "%zu: %g", i, found[i]);
    product(std::vector<float>(rows * 4), {}, {}, 4, rows, 1);
  }
  for (const int64_t inputs : {1, 5, 600}) {
    ends(inputs);
    for (const int64_t at : {int64_t{0}, inputs - 1, 20 * inputs, 36 * inputs + inputs / 2})
      beyond(inputs, at);
  }
  std::printf("largest error %.3g of the sum of magnitudes\n", worst);
}
