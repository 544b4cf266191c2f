// Compares fsq on float32 with the definition: fsq of the same numbers in float64, which compares each of
// them with the exact thresholds.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/fsq.h"

using namespace uefl::cpu;

// Returns n elements. Half of them are at most a few steps of float32 away from a threshold.
static std::vector<float> elements(const FsqForm& form, int64_t rows, std::mt19937& random) {
  const int64_t d = static_cast<int64_t>(form.levels.size());
  std::vector<float> z = normal<float>(rows * d, random);
  const Fsq fsq(form);
  std::vector<double> wide(d), quantized(d);
  int64_t before = 0, index = 0;
  for (int64_t i = 0; i < rows * d / 2; ++i) {
    // bisect between two random elements for a float at which the index of its row changes
    const int64_t j = i % d;
    float lo = -4, hi = 4;
    const auto index_at = [&](float value, int64_t& out) {
      std::fill(wide.begin(), wide.end(), 0.0);
      wide[j] = value;
      fsq.forward(FsqRun<double>{wide.data(), quantized.data(), &out, nullptr}, 0, 1);
    };
    index_at(z[i], before);
    for (int step = 0; step < 40; ++step) {
      const float middle = (lo + hi) / 2;
      index_at(middle, index);
      (index < before ? lo : hi) = middle;
    }
    z[i] = i % 3 ? hi : std::nextafter(hi, i % 2 ? -5.0f : 5.0f);
  }
  z[0] = NAN, z[rows * d - 1] = INFINITY;
  return z;
}

static void matches_the_definition(const FsqForm& form, int64_t rows) {
  std::mt19937 random(static_cast<unsigned>(rows));
  const int64_t d = static_cast<int64_t>(form.levels.size());
  const std::vector<float> z = elements(form, rows, random), grad = normal<float>(rows * d, random);
  const std::vector<double> wide_z(z.begin(), z.end()), wide_grad(grad.begin(), grad.end());
  std::vector<float> quantized(rows * d), grad_z(rows * d);
  std::vector<double> wide_quantized(rows * d), wide_grad_z(rows * d);
  std::vector<int64_t> expected(rows);
  std::vector<int32_t> indices(rows);
  const Fsq fsq(form);
  fsq.forward(FsqRun<double>{wide_z.data(), wide_quantized.data(), expected.data(), nullptr}, 0, rows);
  fsq.backward(FsqBackwardRun<double>{wide_grad.data(), wide_z.data(), wide_grad_z.data()}, 0, rows);
  const int64_t part = rows / 3;
  for (const auto& [lo, hi] : {std::pair{part, rows}, std::pair{int64_t{0}, part}}) {  // in any order
    fsq.forward(FsqRun<float>{z.data(), quantized.data(), nullptr, indices.data()}, lo, hi);
    fsq.backward(FsqBackwardRun<float>{grad.data(), z.data(), grad_z.data()}, lo, hi);
  }
  for (int64_t row = 0; row < rows; ++row)
    CHECK(indices[row] == expected[row], "row %ld", static_cast<long>(row));
  for (int64_t i = 0; i < rows * d; ++i) {
    const bool is_nan = z[i] != z[i];
    const bool close = std::abs(quantized[i] - wide_quantized[i]) < 1e-6;
    CHECK(is_nan ? quantized[i] != quantized[i] : close, "%g is %g", z[i], quantized[i]);
    // clamped: next to the bound, a rounded sum can be on its other side
    CHECK(is_nan || form.clamp || std::abs(grad_z[i] - wide_grad_z[i]) < 4e-6, "%g has %g", z[i], grad_z[i]);
  }
}

void run() {
  const std::vector<std::vector<int64_t>> levels{{8, 5, 5, 5}, {3}, {4, 4, 4, 4, 4, 4, 4}, {33, 32}, {1000}};
  for (const std::vector<int64_t>& counts : levels) {
    for (const bool symmetric : {false, true}) {
      for (const bool clamp : {false, true}) {
        for (const int64_t rows : {1, 15, 16, 300}) matches_the_definition({counts, symmetric, clamp}, rows);
      }
    }
  }
  matches_the_definition({{2, 2}, true, false}, 100);
}
