// linear on AMX against float64, row by row and unit by unit, within the rounding of a product in float32.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/linear.h"

using namespace uefl::cpu;

#if defined(__x86_64__)
static double worst;

static std::vector<float> product(const std::vector<float>& x, const std::vector<float>& weight, const std::vector<float>& bias,
                                  int64_t inputs, int64_t share) {
  const int64_t outputs = static_cast<int64_t>(bias.size()), rows = static_cast<int64_t>(x.size()) / inputs;
  std::vector<float> y(rows * outputs + 16, 7);  // the last ones show what is written too far
  Linear linear(weight.data(), bias.data(), inputs, outputs);
  for (int64_t panel = linear.panels(); panel-- > 0;) linear.pack(panel, panel + 1);
  for (int64_t lo = 0; lo < rows; lo += share) linear.run(x.data(), lo, std::min(rows, lo + share), y.data());
  for (int64_t i = 0; i < 16; ++i) CHECK(y[rows * outputs + i] == 7, "%lld elements beyond the end", static_cast<long long>(i));
  y.resize(rows * outputs);
  return y;
}

static void near(const std::vector<float>& found, const std::vector<float>& x, const std::vector<float>& weight,
                 const std::vector<float>& bias, int64_t inputs) {
  const int64_t outputs = static_cast<int64_t>(bias.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / outputs, unit = static_cast<int64_t>(i) % outputs;
    double sum = bias[unit], size = std::fabs(sum);
    for (int64_t j = 0; j < inputs; ++j) {
      const double term = static_cast<double>(x[row * inputs + j]) * weight[unit * inputs + j];
      sum += term, size += std::fabs(term);
    }
    if (!std::isfinite(static_cast<float>(sum))) {
      CHECK(std::isnan(sum) ? std::isnan(found[i]) : found[i] == static_cast<float>(sum), "[%lld, %lld]: %g, expected %g",
            static_cast<long long>(row), static_cast<long long>(unit), found[i], sum);
      continue;
    }
    // One rounding of the sum for each pair of inputs and part, and what the three products left out amount to.
    const double allowed = size * 0x1p-24 * (3 + 3.0 * static_cast<double>(std::min<int64_t>(inputs, 512)));
    const double error = std::fabs(found[i] - sum);
    if (size > 0) worst = std::max(worst, error / size);
    CHECK(error <= allowed, "[%lld, %lld] of %lld inputs: %.9g, expected %.9g", static_cast<long long>(row), static_cast<long long>(unit),
          static_cast<long long>(inputs), found[i], sum);
  }
}

static void sizes(int64_t rows, int64_t inputs, int64_t outputs) {
  std::mt19937 random(static_cast<unsigned>(rows * 10007 + inputs * 101 + outputs));
  const auto x = normal<float>(rows * inputs, random), weight = normal<float>(outputs * inputs, random),
             bias = normal<float>(outputs, random);
  const auto whole = product(x, weight, bias, inputs, rows);
  near(whole, x, weight, bias, inputs);
  for (const int64_t share : {1, 33})
    CHECK(product(x, weight, bias, inputs, share) == whole, "in shares of %lld rows", static_cast<long long>(share));
}

// Each kind of value in one row and in one unit, so that it meets itself, the others and ordinary numbers.
static void values(int64_t inputs) {
  const float kinds[] = {0.0f,     -0.0f,     1e-45f, 1e-38f, 1e-30f, 1e-13f, 1e13f, 3e37f, std::numeric_limits<float>::max(),
                         INFINITY, -INFINITY, NAN};
  std::mt19937 random(1);
  const int64_t rows = 40, outputs = 37;
  auto x = normal<float>(rows * inputs, random), weight = normal<float>(outputs * inputs, random);
  const auto bias = normal<float>(outputs, random);
  for (int64_t kind = 0; kind < 12; ++kind) {
    x[(kind * 3 + 1) * inputs + kind % inputs] = weight[(kind * 3 + 1) * inputs + (kind + 1) % inputs] = kinds[kind];
    for (int64_t j = 0; kind > 0 && j < inputs; ++j) x[kind * 3 * inputs + j] *= kinds[kind];  // a whole row of that size
  }
  std::fill_n(x.begin(), inputs, 0.0f);
  std::fill_n(weight.begin(), inputs, 0.0f);
  near(product(x, weight, bias, inputs, rows), x, weight, bias, inputs);
}

void run() {
  if (isa() < Isa::amx) {
    std::printf("nothing to test: linear has a kernel for AMX alone\n");
    return;
  }
  for (const int64_t inputs : {1, 2, 3, 31, 32, 33, 511, 512, 513, 1100}) {
    for (const int64_t outputs : {1, 15, 16, 17, 32, 65}) {
      for (const int64_t rows : {1, 16, 33, 130, 300}) sizes(rows, inputs, outputs);
    }
  }
  for (const int64_t inputs : {1, 5, 600}) values(inputs);
  std::printf("largest error %.3g of the sum of magnitudes\n", worst);
}
#else
void run() {}
#endif
