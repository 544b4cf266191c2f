// Compares vq_backward with a plain definition: the straight-through estimator bit for bit, and the rotation
// with the rotation matrix.
#include <cmath>

#include "check.h"
#include "cpu/vq_backward.h"

using namespace uefl::cpu;

// Returns lambda R^T g for one segment, with the matrix R = 1 - 2 w w^T + 2 v u^T in long double.
static std::vector<long double> rotated(const float* x, const float* q, const float* g, int64_t d) {
  const auto unit = [&](auto&& element) {
    std::vector<long double> vector(d);
    long double square = 0;
    for (int64_t j = 0; j < d; ++j) vector[j] = element(j), square += vector[j] * vector[j];
    for (long double& value : vector) value /= std::sqrt(square);
    return vector;
  };
  const auto u = unit([&](int64_t j) { return x[j]; }), v = unit([&](int64_t j) { return q[j]; });
  const auto w = unit([&](int64_t j) { return u[j] + v[j]; });
  long double x_norm = 0, q_norm = 0;
  for (int64_t j = 0; j < d; ++j) x_norm += u[j] * x[j], q_norm += v[j] * q[j];
  const long double lambda = q_norm / x_norm;
  std::vector<long double> result(d);
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t j = 0; j < d; ++j)
      result[i] += lambda * ((i == j) - 2 * w[j] * w[i] + 2 * v[j] * u[i]) * g[j];
  }
  return result;
}

static void matches_the_definition(int64_t d, bool channels_first) {
  std::mt19937 random(static_cast<unsigned>(d));
  const int64_t n = 37, s = 3, k = 5, dim = s * d;
  const auto x = normal<float>(n * dim, random), g = normal<float>(n * dim, random),
             codewords = normal<float>(s * k * d, random);
  std::vector<int64_t> indices(n * s);
  for (int64_t& index : indices) index = std::uniform_int_distribution<int64_t>(0, k - 1)(random);
  const auto rows = [&](const float* data) {
    return channels_first ? StridedRows{data, Dtype::f32, n, 1, dim, 1, 0, n}
                          : StridedRows{data, Dtype::f32, n, 1, dim, dim, 0, 1};
  };
  const auto at = [&](int64_t row, int64_t column) {
    return channels_first ? column * n + row : row * dim + column;
  };
  for (const bool rotation : {false, true}) {
    std::vector<float> out(n * dim, NAN);
    const float pull = 0.3f;
    const VqBackward run{.x = rows(x.data()),
                         .grad_quantized = rows(g.data()),
                         .grad_x = rows(out.data()),
                         .wide = false,
                         .rotation = rotation,
                         .d = d,
                         .codebook_step = k,
                         .indices = indices.data(),
                         .codewords = codewords.data(),
                         .pull = pull};
    vq_backward(run, 20, n);  // in any order
    vq_backward(run, 0, 20);
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t segment = 0; segment < s; ++segment) {
        const float* q = &codewords[(indices[row * s + segment] + segment * k) * d];
        std::vector<float> a(d), b(d);
        for (int64_t j = 0; j < d; ++j)
          a[j] = x[at(row, segment * d + j)], b[j] = g[at(row, segment * d + j)];
        const auto turned = rotated(a.data(), q, b.data(), d);
        for (int64_t j = 0; j < d; ++j) {
          const float got = out[at(row, segment * d + j)];
          const volatile float difference = a[j] - q[j],
                               pulled = difference * pull;  // volatile, so that each one is rounded
          const double want =
              rotation ? static_cast<double>(turned[j] + pull * (static_cast<long double>(a[j]) - q[j]))
                       : b[j] + pulled;
          const double tolerance = rotation ? 1e-7 * std::fabs(want) + 1e-12 : 0;
          CHECK(std::fabs(got - want) <= tolerance, "row %ld, segment %ld, element %ld: %g, expected %g",
                static_cast<long>(row), static_cast<long>(segment), static_cast<long>(j), got, want);
        }
      }
    }
  }
}

void run() {
  for (const int64_t d : {2, 7, 8, 21}) {
    for (const bool channels_first : {false, true}) matches_the_definition(d, channels_first);
  }
}
