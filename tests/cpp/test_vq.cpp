// Compares Vq with a plain definition: gather, error, counts and fixed-point sums.
#include <cmath>

#include "check.h"
#include "cpu/vq.h"

using namespace uefl::cpu;

static void matches_the_definition() {
  std::mt19937 random(8);
  const int64_t n = 700, s = 2, d = 13, k = 21;
  const auto x = normal<float>(n * s * d, random), codewords = normal<float>(s * k * d, random);
  const Codebooks codebooks{codewords.data(), Dtype::f32, s, k, d};
  const Search search(codebooks, Metric::l2, true);
  std::vector<float> quantized(n * s * d, std::nanf(""));
  std::vector<int64_t> indices(n * s, -1), counts(s * k);
  std::vector<double> sums(s * k * d, std::nan(""));
  Vq vq(search, codebooks, codewords.data(), {x.data(), Dtype::f32, n, 1, s * d, s * d, 0, 1},
        {quantized.data(), indices.data(), counts.data(), sums.data()});
  for (int64_t block = vq.blocks() - 1; block >= 0; --block) vq.run(block, block + 1);  // in any order
  for (int64_t block = vq.blocks() - 1; block >= 0; --block) vq.add(block, block + 1);
  for (int64_t code = vq.codeword_count() - 1; code >= 0; --code) vq.write_sums(code, code + 1);
  const double error = vq.error();

  double expected_error = 0;
  std::vector<int64_t> expected_counts(s * k);
  std::vector<long double> expected_sums(s * k * d);
  for (int64_t i = 0; i < n * s; ++i) {
    const int64_t code = nearest(&x[i * d], 1, &codewords[i % s * k * d], k, d) + i % s * k;
    CHECK(indices[i] == code % k, "index %ld", static_cast<long>(i));
    ++expected_counts[code];
    for (int64_t j = 0; j < d; ++j) {
      const double difference = static_cast<double>(x[i * d + j]) - codewords[code * d + j];
      expected_error += difference * difference;
      expected_sums[code * d + j] += x[i * d + j];
      CHECK(quantized[i * d + j] == codewords[code * d + j], "quantized %ld", static_cast<long>(i));
    }
  }
  CHECK(counts == expected_counts, "counts");
  CHECK(std::fabs(error - expected_error) <= 1e-12 * expected_error, "error %g, expected %g", error,
        expected_error);
  for (size_t i = 0; i < sums.size(); ++i) CHECK(std::fabs(sums[i] - expected_sums[i]) < 1e-12, "sum %zu", i);
}

static void no_rows() {
  const float codewords[2] = {1, 2};
  const Codebooks codebooks{codewords, Dtype::f32, 1, 2, 1};
  const Search search(codebooks, Metric::l2, true);
  int64_t counts[2] = {0, 0};
  double sums[2] = {std::nan(""), std::nan("")};
  Vq vq(search, codebooks, codewords, {nullptr, Dtype::f32, 0, 1, 1, 1, 0, 1},
        {nullptr, nullptr, counts, sums});
  vq.run(0, vq.blocks());
  vq.add(0, vq.blocks());
  vq.write_sums(0, vq.codeword_count());
  CHECK(vq.error() == 0 && sums[0] == 0 && sums[1] == 0 && counts[0] == 0, "N = 0");
}

// Rows have very different sizes, one per codeword, and one is infinite. Each sum has the precision of its
// own rows.
static void a_unit_for_each_codeword() {
  const double codewords[5] = {-1, 0, 1, 1e16, 1e20};  // the last row is infinitely far from all codewords,
                                                       // and takes the first one
  const double x[6] = {1e-20, 0.75, 1e16, 1e20, 3e-20, -INFINITY};
  const Codebooks codebooks{codewords, Dtype::f64, 1, 5, 1};
  const Search search(codebooks, Metric::l2, true);
  double quantized[6], sums[5];
  int64_t indices[6], counts[5] = {};
  Vq vq(search, codebooks, codewords, {x, Dtype::f64, 6, 1, 1, 1, 0, 1}, {quantized, indices, counts, sums});
  vq.run(0, vq.blocks());
  vq.add(0, vq.blocks());
  vq.write_sums(0, vq.codeword_count());
  CHECK(std::isnan(sums[0]), "got %g", sums[0]);
  CHECK(std::fabs(sums[1] - 4e-20) < 1e-35, "got %g", sums[1]);
  CHECK(sums[2] == 0.75 && sums[3] == 1e16 && sums[4] == 1e20, "got %g, %g and %g", sums[2], sums[3],
        sums[4]);
}

void run() {
  matches_the_definition();
  a_unit_for_each_codeword();
  no_rows();
}
