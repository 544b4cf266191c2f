// Compares the float32 kernels of the transition ops with their float64 definitions, near the ends of tables
// and vectors.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/set_proportion_loss.h"
#include "cpu/transition.h"

using namespace uefl::cpu;

static double worst;

static void near(const char* what, const std::vector<float>& found, const std::vector<double>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::fabs(found[i] - expected[i]) / (1 + std::fabs(expected[i]));
    worst = std::max(worst, error);
    CHECK(error <= 5e-7, "%s [%zu]: %g, expected %g", what, i, found[i], expected[i]);
  }
}

// Checks all numbers of classes and sets near the vector widths. Logits range from flat to so far apart that
// exponentials underflow.
static void matches_the_definition(int64_t k, int64_t m, double scale) {
  std::mt19937 random(static_cast<unsigned>(k * 100 + m));
  const int64_t b = 9;
  const auto z = normal<float>(b * k, random, 0, scale);
  std::vector<float> matrix(m * k), marginal(k);
  for (float& value : matrix) value = std::log(static_cast<float>(1 + random() % 9));
  for (int64_t j = 0; j < k; ++j) {
    double total = 0;
    for (int64_t i = 0; i < m; ++i) total += std::exp(static_cast<double>(matrix[i * k + j]));
    marginal[j] = static_cast<float>(std::log(total));
  }
  std::vector<int64_t> targets(b);
  for (int64_t n = 0; n < b; ++n) targets[n] = n % m;
  const std::vector<double> z64(z.begin(), z.end()), matrix64(matrix.begin(), matrix.end()),
      marginal64(marginal.begin(), marginal.end());

  std::vector<double> loss(b), slope(b * k), log_g(b * m);
  std::vector<float> found_loss(b, NAN), found_slope(b * k, NAN), found_log_g(b * m, NAN);
  const StridedRows wide{z64.data(), Dtype::f64, b, 1, k, k, 0, 1},
      narrow{z.data(), Dtype::f32, b, 1, k, k, 0, 1};
  const LogTransition log64{matrix64.data(), marginal64.data(), 1, m, k},
      log32{matrix.data(), marginal.data(), 1, m, k};
  const Transition definition("nll", wide, targets.data(), nullptr, log64),
      kernel("nll", narrow, targets.data(), nullptr, log32);
  definition.nll(0, definition.blocks(), loss.data(), slope.data());
  kernel.nll(0, kernel.blocks(), found_loss.data(), found_slope.data());
  near("loss", found_loss, loss);
  near("gradient", found_slope, slope);
  const Transition definitions("probs", wide, nullptr, nullptr, log64),
      kernels("probs", narrow, nullptr, nullptr, log32);
  definitions.probs(0, definitions.blocks(), log_g.data());
  kernels.probs(0, kernels.blocks(), found_log_g.data());
  near("probs", found_log_g, log_g);
}

void run() {
  for (const int64_t k : {1, 3, 4, 5, 8, 15, 16, 17, 33})
    for (const int64_t m : {1, 2, 16, 17}) matches_the_definition(k, m, 3);
  for (const double scale : {0.1, 20.0, 80.0, 1e3, 1e6}) matches_the_definition(10, 10, scale);
  std::printf("largest error %.3g\n", worst);
}
