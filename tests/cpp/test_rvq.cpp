// Compares rvq with the definition: the codeword nearest to the residual of the stages before.
#include <cmath>

#include "check.h"
#include "cpu/rvq.h"

using namespace uefl::cpu;

static void matches_the_definition(int64_t n, bool sums_wanted) {
  std::mt19937 random(9);
  const int64_t s = 2, d = 13, k[3] = {21, 5, 200};
  const auto x = normal<float>(n * s * d, random);
  std::vector<std::vector<float>> codebooks;
  std::vector<std::vector<int64_t>> indices, counts;
  std::vector<std::vector<double>> sums;
  std::vector<float> residual(n * s * d), total(n * s * d);
  RvqRun run{.x = {x.data(), Dtype::f32, n, 1, s * d, s * d, 0, 1},
             .stages = {},
             .metric = Metric::l2,
             .exact = true,
             .few = !sums_wanted && n < 10,
             .residual = residual.data(),
             .total = total.data()};
  for (const int64_t size : k) {
    codebooks.push_back(normal<float>(s * size * d, random));
    indices.emplace_back(n * s, -1), counts.emplace_back(s * size), sums.emplace_back(s * size * d);
  }
  for (int stage = 0; stage < 3; ++stage) {
    run.stages.push_back({.codebooks = {codebooks[stage].data(), Dtype::f32, s, k[stage], d},
                          .codewords = codebooks[stage].data(),
                          .indices = indices[stage].data(),
                          .counts = counts[stage].data(),
                          .sums = sums_wanted ? sums[stage].data() : nullptr});
  }
  const std::vector<double> errors = rvq(run, on_this_thread, on_this_thread);

  std::vector<float> left = x, expected_total(n * s * d);
  for (int stage = 0; stage < 3; ++stage) {
    double error = 0;
    std::vector<int64_t> expected_counts(s * k[stage]);
    std::vector<long double> expected_sums(s * k[stage] * d);
    for (int64_t i = 0; i < n * s; ++i) {
      const float* codebook = &codebooks[stage][i % s * k[stage] * d];
      const int64_t code = nearest(&left[i * d], 1, codebook, k[stage], d), place = i % s * k[stage] + code;
      CHECK(indices[stage][i] == code, "index %ld of stage %d", static_cast<long>(i), stage);
      ++expected_counts[place];
      for (int64_t j = 0; j < d; ++j) {
        const double difference = static_cast<double>(left[i * d + j]) - codebook[code * d + j];
        error += difference * difference;
        expected_sums[place * d + j] += left[i * d + j];
        left[i * d + j] -= codebook[code * d + j];
        expected_total[i * d + j] += codebook[code * d + j];
      }
    }
    CHECK(counts[stage] == expected_counts, "counts of stage %d", stage);
    CHECK(std::fabs(errors[stage] - error) <= 1e-12 * error, "error %g, expected %g", errors[stage], error);
    for (size_t i = 0; sums_wanted && i < sums[stage].size(); ++i)
      CHECK(std::fabs(sums[stage][i] - expected_sums[i]) < 1e-12, "sum %zu of stage %d", i, stage);
  }
  CHECK(total == expected_total, "total of %ld rows", static_cast<long>(n));
}

void run() {
  for (const int64_t n : {1, 7, 700}) {
    matches_the_definition(n, false);
    matches_the_definition(n, true);
  }
}
