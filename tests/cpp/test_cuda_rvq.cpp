// Runs all stages of rvq in one CUDA kernel on the CPU, thread by thread, and compares them with the
// definition stage by stage. The emulation comes before the kernels.
#include <cmath>

#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_mma.h"
#include "cuda/rvq_kernels.h"

namespace cuda = uefl::cuda;

template <class T>
static T rounded(float value) {
  return static_cast<T>(value);
}

template <class T>
struct RvqCase {
  cuda::Shape shape;
  std::vector<T> x;
  std::vector<std::vector<float>> codebooks;

  RvqCase(int64_t rows, int64_t segments, int64_t per_stage, int64_t d, const std::vector<int64_t>& sizes,
          int seed)
      : shape{rows * segments, segments, per_stage, d, 0, 0, rows, 0, segments * d, 1, true} {
    std::mt19937 random(seed);
    for (const double value : normal<double>(rows * segments * d, random)) x.push_back(static_cast<T>(value));
    for (const int64_t size : sizes) codebooks.push_back(normal<float>(per_stage * size * d, random));
  }
  int64_t size(size_t stage) const {
    return static_cast<int64_t>(codebooks[stage].size()) / shape.d / shape.codebooks;
  }
};

template <class T>
static bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
static void check(const char* what, const RvqCase<T>& given) {
  const cuda::Shape& shape = given.shape;
  const auto stages = static_cast<int64_t>(given.codebooks.size());
  std::vector<int64_t> indices(shape.outputs * stages, -7), expected(indices);
  std::vector<long long> counts, expected_counts;
  std::vector<float> losses(stages, NAN);
  std::vector<T> quantized(shape.outputs * shape.d, T(NAN)), expected_total(quantized.size(), T(0.0f));
  std::vector<double> errors(shape.outputs * stages, NAN), expected_errors(stages);
  cuda::Rvq<T> wanted{};
  for (const auto& codebook : given.codebooks) wanted.codewords += codebook.size() / shape.d;
  counts.assign(wanted.codewords, 7), expected_counts.assign(wanted.codewords, 0);
  int64_t before = 0;
  for (size_t i = 0; i < given.codebooks.size(); before += shape.codebooks * given.size(i), ++i)
    wanted.stage[i] = {given.codebooks[i].data(), given.size(i), counts.data() + before};
  wanted.stages = static_cast<int>(stages), wanted.quantized = quantized.data(),
  wanted.indices = indices.data(), wanted.losses = losses.data(), wanted.factor = 0.5,
  wanted.errors = errors.data(), wanted.counts = counts.data();
  emulation::launch_cooperative(static_cast<unsigned>(shape.outputs), 64, cuda::rvq_few<T>, given.x.data(),
                                shape, wanted);

  for (int64_t output = 0; output < shape.outputs; ++output) {
    std::vector<T> residual(shape.d);
    for (int64_t j = 0; j < shape.d; ++j) residual[j] = given.x[shape.begin(output) + j * shape.stride];
    before = 0;
    for (int64_t i = 0; i < stages; ++i) {
      const int64_t k = given.size(i), codebook = output % shape.codebooks;
      const float* codewords = given.codebooks[i].data() + codebook * k * shape.d;
      std::vector<float> row;
      for (const T value : residual) row.push_back(static_cast<float>(value));
      const int64_t code = nearest(row.data(), 1, codewords, k, shape.d);
      expected[output * stages + i] = code;
      ++expected_counts[before + codebook * k + code];
      before += shape.codebooks * k;
      for (int64_t j = 0; j < shape.d; ++j) {
        const float close = codewords[code * shape.d + j];
        const auto narrow = static_cast<float>(rounded<T>(close));
        expected_errors[i] += std::pow(static_cast<double>(row[j]) - close, 2);
        T& total = expected_total[output * shape.d + j];
        total = rounded<T>(static_cast<float>(total) + narrow), residual[j] = rounded<T>(row[j] - narrow);
      }
    }
  }
  CHECK(indices == expected, "%s: indices", what);
  CHECK(counts == expected_counts, "%s: counts", what);
  CHECK(same(quantized, expected_total), "%s: quantized", what);
  for (int64_t i = 0; i < stages; ++i) {
    const double loss = static_cast<float>(0.5 * expected_errors[i]);
    CHECK(std::isfinite(loss) ? std::fabs(losses[i] - loss) <= 1e-6 * loss : !std::isfinite(losses[i]),
          "%s: loss %ld is %g, expected %g", what, static_cast<long>(i), static_cast<double>(losses[i]),
          loss);
  }
}

// Codewords are equally near, or almost, and float32 overflows or underflows for some rows.
static void hard_rows() {
  for (const float scale : {1.0f, 1e-22f, 3e-23f, 1e-23f, 1e-38f, 1e15f, 1e25f, 1e38f}) {
    RvqCase<float> given(9, 1, 1, 8, {40, 40, 33}, 7);
    for (auto& codebook : given.codebooks) {
      for (size_t i = 0; i < codebook.size() / 2; ++i)
        codebook[codebook.size() / 2 + i] = i % 5 ? codebook[i] : std::nextafter(codebook[i], 9.0f);
      for (float& value : codebook) value *= scale;
    }
    for (size_t i = 0; i < given.x.size(); ++i) given.x[i] *= scale;
    for (int64_t j = 0; j < 8; ++j)  // between two codewords
      given.x[j] = given.codebooks[0][j] / 2 + given.codebooks[0][8 + j] / 2;
    check("hard", given);
  }
  for (const float value : {NAN, INFINITY, -INFINITY}) {
    RvqCase<float> given(5, 1, 1, 4, {9, 6}, 8);
    given.x[9] = value;
    check("a row that is not finite", given);
    RvqCase<float> other(5, 1, 1, 4, {9, 6}, 8);
    other.codebooks[0][5] = value, other.codebooks[1][0] = value;
    check("codewords that are not finite", other);
  }
}

// The two nearest codewords of a row are on its two sides, and float32 often confuses them.
static void near_ties(float scale) {
  RvqCase<float> given(40, 1, 1, 16, {80}, 10);
  std::vector<float>& codewords = given.codebooks[0];
  for (size_t i = 0; i < given.x.size(); ++i) {
    const float apart = codewords[i] / 16;
    given.x[i] *= scale;
    codewords[i] = given.x[i] + apart * scale, codewords[given.x.size() + i] = given.x[i] - apart * scale;
  }
  check("near ties", given);
}

// Two codewords are on the two sides of a row, at the distance at which a square overflows in float32. The
// nearer one may overflow.
static void near_overflow() {
  for (int seed = 0; seed < 300; ++seed) {
    RvqCase<float> given(1, 1, 1, 16, {2}, seed);
    std::vector<float>& codewords = given.codebooks[0];
    double square = 0;
    for (int j = 0; j < 16; ++j) square += std::pow(static_cast<double>(codewords[j]), 2);
    const double up = std::sqrt(static_cast<double>(std::numeric_limits<float>::max()) / square);
    for (int j = 0; j < 16; ++j) {
      codewords[j] = static_cast<float>(codewords[j] * up), codewords[16 + j] = -codewords[j];
      given.x[j] *= static_cast<float>(up * 1e-7);
    }
    check("near overflow", given);
  }
}

void run() {
  check("one", RvqCase<float>(1, 1, 1, 4, {1}, 1));
  check("stages", RvqCase<float>(6, 1, 1, 32, {70, 5, 64, 33}, 2));
  check("long rows", RvqCase<float>(2, 1, 1, 500, {17, 18}, 3));
  check("segments", RvqCase<float>(3, 3, 1, 8, {20, 9}, 4));
  check("codebooks", RvqCase<float>(3, 3, 3, 8, {20, 9}, 5));
  check("float16", RvqCase<_Float16>(5, 1, 1, 24, {40, 40, 40}, 6));
  check("bfloat16", RvqCase<emulation::Bfloat16>(5, 1, 1, 24, {40, 40, 40}, 6));
  RvqCase<float> apart(5, 2, 1, 8, {12, 12}, 9);  // elements of a row are five apart
  apart.shape.inner = 5, apart.shape.outer_stride = 80, apart.shape.inner_stride = 1, apart.shape.stride = 5;
  check("channels first", apart);
  hard_rows();
  for (const float scale : {1.0f, 1e-18f, 1e-20f, 1e-21f, 1e-22f, 1e10f}) near_ties(scale);
  near_overflow();
}
