// Runs the CUDA kernels of the transition ops on the CPU, thread by thread, and compares them with the CPU
// kernels in float64. The emulation comes before the kernels.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/set_proportion_loss.h"
#include "cpu/transition.h"
#include "cuda/emulation.h"
#include "cuda/transition_kernels.h"

namespace cuda = uefl::cuda::transition;
namespace cpu = uefl::cpu;

static cpu::StridedRows rows_of(const std::vector<double>& logits, int64_t n, int64_t k) {
  return {logits.data(), cpu::Dtype::f64, n, 1, k, k, 0, 1};
}

template <class T>
static std::vector<T> as(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

template <class T>
static void near(const char* what, const std::vector<T>& found, const std::vector<double>& expected,
                 double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool same = found[i] == expected[i] || (std::isnan(found[i]) && std::isnan(expected[i]));
    CHECK(same || std::fabs(found[i] - expected[i]) <= tolerance * (1 + std::fabs(expected[i])),
          "%s [%zu]: %g, expected %g", what, i, static_cast<double>(found[i]), expected[i]);
  }
}

// Makes logits in the precision of T, and a matrix of two groups with zeros, an absent class and an absent
// set.
template <class T>
static void transition(int64_t b, int64_t k, int64_t m, double scale, double tolerance) {
  std::mt19937 random(static_cast<unsigned>(b + k + m));
  const auto z = normal<T>(b * k, random, 0, scale);
  std::vector<T> matrix(2 * m * k), marginal(2 * k);
  for (size_t i = 0; i < matrix.size(); ++i)
    matrix[i] = random() % 5 ? std::log(T(1 + random() % 9)) : -T(INFINITY);
  for (int64_t i = 0; i < 2 * m; ++i) matrix[i * k] = 0;
  for (int64_t i = 0; i < m && k > 2; ++i) matrix[i * k + 1] = -T(INFINITY);
  if (m > 1) std::fill_n(&matrix[(2 * m - 1) * k], k, -T(INFINITY));
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t j = 0; j < k; ++j) {
      double total = 0;
      for (int64_t i = 0; i < m; ++i) total += std::exp(static_cast<double>(matrix[(g * m + i) * k + j]));
      marginal[g * k + j] = static_cast<T>(std::log(total));
    }
  }
  std::vector<int64_t> groups(b), targets(b);
  for (int64_t n = 0; n < b; ++n) groups[n] = n % 2, targets[n] = n % std::max<int64_t>(1, m - 1);
  targets[0] = -100;

  const std::vector<double> logits(z.begin(), z.end()), matrix64(matrix.begin(), matrix.end()),
      marginal64(marginal.begin(), marginal.end());
  const cpu::LogTransition log{matrix64.data(), marginal64.data(), 2, m, k};
  std::vector<double> loss(b), slope(b * k), log_g(b * m), back(b * k), grad = normal<double>(b * m, random);
  const cpu::Transition nll("nll", rows_of(logits, b, k), targets.data(), groups.data(), log, -100);
  nll.nll(0, nll.blocks(), loss.data(), slope.data());
  const cpu::Transition probs("probs", rows_of(logits, b, k), nullptr, groups.data(), log);
  probs.probs(0, probs.blocks(), log_g.data());
  probs.probs_backward(0, probs.blocks(), grad.data(), back.data());

  const cuda::TransitionProblem<T> problem{z.data(),      b, k, k, 1, matrix.data(), marginal.data(),
                                           groups.data(), 2, m};
  std::vector<T> found_loss(b, NAN), found_slope(b * k, NAN), found_log_g(b * m, NAN), found_back(b * k, NAN),
      weight = as<T>(grad);
  emulation::launch(2, 64, cuda::nll<T>, problem, targets.data(), int64_t{-100}, found_loss.data(),
                    found_slope.data());
  near("loss", found_loss, loss, tolerance);
  near("gradient", found_slope, slope, tolerance);
  emulation::launch(2, 64, cuda::probs<T>, problem, found_log_g.data());
  near("probs", found_log_g, log_g, tolerance);
  emulation::launch(2, 64, cuda::probs_backward<T>, problem, weight.data(), found_log_g.data(),
                    found_back.data());
  near("gradient of probs", found_back, back, tolerance * static_cast<double>(m) * (1 + scale));
}

// Checks logits stored by columns, one matrix for all rows, no gradient, and no rows.
template <class T>
static void layouts() {
  const int64_t b = 5, k = 37, m = 3;
  std::mt19937 random(1);
  const auto z = normal<T>(b * k, random), matrix = normal<T>(m * k, random), marginal = normal<T>(k, random),
             grad = normal<T>(b * m, random);
  std::vector<T> columns(b * k);
  for (int64_t i = 0; i < b * k; ++i) columns[i % k * b + i / k] = z[i];
  const std::vector<int64_t> groups(b, 0), targets{0, 2, 1, -100, 0};
  const cuda::TransitionProblem<T> plain{z.data(),      b, k, k, 1, matrix.data(), marginal.data(),
                                         groups.data(), 1, m},
      other{columns.data(), b, k, 1, b, matrix.data(), marginal.data(), nullptr, 1, m},
      none{nullptr, 0, k, k, 1, matrix.data(), marginal.data(), nullptr, 1, m};
  const auto all = [&](const cuda::TransitionProblem<T>& problem, bool with_gradient) {
    std::vector<T> loss(b, 7), slope(b * k, 7), log_g(b * m, 7), back(b * k, 7);
    emulation::launch(1, 64, cuda::nll<T>, problem, targets.data(), int64_t{-100}, loss.data(),
                      with_gradient ? slope.data() : nullptr);
    emulation::launch(1, 64, cuda::probs<T>, problem, log_g.data());
    emulation::launch(1, 64, cuda::probs_backward<T>, problem, grad.data(), log_g.data(), back.data());
    for (const auto* part : {&slope, &log_g, &back}) loss.insert(loss.end(), part->begin(), part->end());
    return loss;
  };
  const auto expected = all(plain, true), found = all(other, true), less = all(other, false),
             untouched = all(none, true);
  CHECK(found == expected, "stored by columns");
  CHECK(std::equal(less.begin(), less.begin() + b, expected.begin()) && less[b] == 7, "without a gradient");
  CHECK(std::count(untouched.begin(), untouched.end(), T(7)) == static_cast<int64_t>(untouched.size()),
        "no rows");
}

static void out_of_range() {
  const std::vector<float> z{1, 2, 3, INFINITY, 5, 6, 7, 8}, matrix(4, 0.0f), marginal(2, std::log(2.0f));
  const std::vector<int64_t> targets{0, 0, 2, -1}, groups{0, 0, 0, 1};
  std::vector<float> loss(4, 0), slope(8, 0), log_g(8, 0);
  const cuda::TransitionProblem<float> problem{z.data(),      4, 2, 2, 1, matrix.data(), marginal.data(),
                                               groups.data(), 1, 2};
  emulation::launch(1, 64, cuda::nll<float>, problem, targets.data(), int64_t{-100}, loss.data(),
                    slope.data());
  CHECK(!std::isnan(loss[0]) && std::isnan(loss[1]) && std::isnan(loss[2]) && std::isnan(loss[3]), "loss");
  CHECK(!std::isnan(slope[1]) && std::isnan(slope[2]) && std::isnan(slope[5]) && std::isnan(slope[7]),
        "gradient");
  emulation::launch(1, 64, cuda::probs<float>, problem, log_g.data());
  CHECK(!std::isnan(log_g[0]) && std::isnan(log_g[2]) && std::isnan(log_g[7]), "probs");
}

template <class T>
static void proportions(int64_t n, int64_t k, double scale, double tolerance) {
  std::mt19937 random(static_cast<unsigned>(n + k));
  const auto z = normal<T>(n * k, random, 0, scale);
  const std::vector<int64_t> offsets{0, 1, n / 2, n};
  std::vector<T> shares(3 * k);
  for (T& share : shares) share = static_cast<T>(random() % 4) / 4;
  const std::vector<double> logits(z.begin(), z.end()), shares64(shares.begin(), shares.end());
  std::vector<double> loss(3), slope(n * k);
  cpu::set_proportion_loss({offsets.data(), shares64.data(), 3, k}, rows_of(logits, n, k), 0, 3, loss.data(),
                           slope.data());
  std::vector<T> totals(n + 3 * k, NAN), found_loss(3, NAN), found_slope(n * k, NAN);
  const cuda::SetProblem<T> problem{
      z.data(), n, k, k, 1, offsets.data(), shares.data(), 3, totals.data(), totals.data() + n};
  emulation::launch(2, 64, cuda::row_totals<T>, problem);
  emulation::launch(2, 64, cuda::class_totals<T>, problem);
  emulation::launch(2, 64, cuda::proportion<T>, problem, found_loss.data(), found_slope.data());
  near("loss of sets", found_loss, loss, tolerance);
  near("gradient of sets", found_slope, slope, tolerance * (1 + scale));
}

// Invalid row ranges count as valid ones.
static void ranges() {
  const int64_t n = 5, k = 3;
  std::mt19937 random(2);
  const auto z = normal<float>(n * k, random);
  const std::vector<float> shares(3 * k, 1.0f / 3);
  const auto losses = [&](const std::vector<int64_t>& offsets, std::vector<float>& slope) {
    std::vector<float> totals(n + 3 * k, NAN), loss(3, 0);
    const cuda::SetProblem<float> problem{
        z.data(), n, k, k, 1, offsets.data(), shares.data(), 3, totals.data(), totals.data() + n};
    emulation::launch(1, 64, cuda::row_totals<float>, problem);
    emulation::launch(1, 64, cuda::class_totals<float>, problem);
    emulation::launch(1, 64, cuda::proportion<float>, problem, loss.data(),
                      slope.empty() ? nullptr : slope.data());
    return loss;
  };
  std::vector<float> slope(n * k, 0), nothing;
  const auto proper = losses({0, 2, 5, 5}, slope), loss = losses({-9, 2, INT64_MAX, INT64_MIN}, nothing);
  CHECK(loss[0] == proper[0] && loss[1] == proper[1] && std::isfinite(loss[1]), "%g %g", loss[0], loss[1]);
  CHECK(std::isnan(loss[2]) && std::isnan(proper[2]), "a set without rows");
}

void run() {
  layouts<float>();
  layouts<double>();
  ranges();
  transition<float>(5, 10, 4, 3, 2e-6);
  transition<float>(4, 40, 3, 1e3, 2e-6);
  transition<float>(3, 1, 1, 1, 2e-6);
  transition<double>(5, 33, 2, 10, 1e-13);
  out_of_range();
  proportions<float>(9, 5, 3, 2e-6);
  proportions<float>(7, 40, 100, 2e-6);
  proportions<double>(6, 3, 3, 1e-13);
}
