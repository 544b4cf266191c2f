// Runs the kernels that follow the CUDA searches in vq and in a step of k-means on the CPU, thread by thread,
// and compares them with plain sums. The emulation comes before the kernels.
#include <algorithm>
#include <bit>
#include <cmath>

#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_mma.h"
#include "cuda/far.h"
#include "cuda/kmeans_step_kernels.h"
#include "cuda/row_sums.h"
#include "cuda/vq_gather.h"
#include "cuda/vq_sum_units.h"

namespace cuda = uefl::cuda;

static long long bits(double value) { return __double_as_longlong(value); }

template <class T>
static T rounded(double value) {
  if constexpr (sizeof(T) < sizeof(float)) return static_cast<T>(static_cast<float>(value));
  return static_cast<T>(value);
}

template <class T>
static bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Rows, codewords and indices, and the expected sums, written out.
template <class T, class Codeword>
struct SumsCase {
  cuda::Shape shape;
  Far<T> x;
  std::vector<Codeword> codewords;
  std::vector<int64_t> indices;
  std::vector<double> scales;

  SumsCase(const cuda::Shape& shape, int64_t elements, int seed, int taken = 1 << 30)
      : shape(shape), x(elements) {
    std::mt19937 random(seed);
    const auto values = normal<double>(shape.outputs * shape.d, random);
    for (int64_t i = 0; i < shape.outputs * shape.d; ++i) {
      x[shape.begin(i / shape.d) + i % shape.d * shape.stride] = static_cast<T>(values[i]);
    }
    for (const double value : normal<double>(shape.codebooks * shape.k * shape.d, random))
      codewords.push_back(static_cast<Codeword>(value));
    for (int64_t i = 0; i < shape.outputs; ++i)
      indices.push_back(static_cast<int64_t>(random() % std::min<int64_t>(shape.k, taken)));
    for (int64_t i = 0; i < shape.codebooks * shape.k; ++i)
      scales.push_back(std::ldexp(1, 30 + static_cast<int>(i % 5)));
  }

  double element(int64_t output, int64_t j) const {
    return static_cast<double>(x[shape.begin(output) + j * shape.stride]);
  }
  int64_t code(int64_t output) const { return output % shape.codebooks * shape.k + indices[output]; }
};

// Memory for the results of a kernel. It begins as NaN, or as a number that never occurs, where the kernel
// must write.
template <class T>
struct KernelSums {
  std::vector<T> quantized;
  std::vector<long long> counts, largest, sums;
  double error = NAN;
  std::vector<double> parts;
  long long done = 0;

  explicit KernelSums(const cuda::Shape& shape)
      : quantized(shape.outputs * shape.d, T(NAN)),
        counts(shape.codebooks * shape.k, 7),
        largest(counts),
        sums(counts.size() * shape.d, 7) {
    const auto size = [](const std::vector<long long>& numbers) {
      return static_cast<int64_t>(numbers.size());
    };
    emulation::launch(
        1, 64, cuda::clear_spans,
        cuda::Spans{{counts.data(), largest.data(), sums.data()}, {size(counts), size(largest), size(sums)}});
  }
  cuda::Total total(int64_t blocks) {
    parts.assign(blocks, NAN);
    return {&error, nullptr, 1, parts.data(), &done};
  }
};

template <class T, class Codeword>
static void check(const char* what, const SumsCase<T, Codeword>& given, const KernelSums<T>& found,
                  bool with_sums) {
  const cuda::Shape& shape = given.shape;
  KernelSums<T> expected(shape);
  double error = 0;
  for (int64_t output = 0; output < shape.outputs; ++output) {
    const int64_t code = given.code(output);
    ++expected.counts[code];
    for (int64_t j = 0; j < shape.d; ++j) {
      const double value = given.element(output, j),
                   target = static_cast<double>(given.codewords[code * shape.d + j]);
      expected.quantized[output * shape.d + j] = rounded<T>(target);
      error += (value - target) * (value - target);
      if (!with_sums) continue;
      expected.largest[code] =
          std::max(expected.largest[code], bits(std::isfinite(value) ? std::fabs(value) : INFINITY));
      expected.sums[code * shape.d + j] += std::llrint(value * given.scales[code]);
    }
  }
  CHECK(same(found.quantized, expected.quantized), "%s: quantized", what);
  CHECK(found.counts == expected.counts, "%s: counts", what);
  CHECK(found.largest == expected.largest && found.sums == expected.sums, "%s: largest or sums", what);
  const bool close = std::isfinite(error) ? std::fabs(found.error - error) <= 1e-7 * error
                                          : bits(found.error) << 1 == bits(error) << 1;
  CHECK(close, "%s: error %g, expected %g", what, found.error, error);
}

template <int kPiece, class T, class Codeword>
static void gather(const char* what, const SumsCase<T, Codeword>& given, int64_t most_blocks) {
  KernelSums<T> found(given.shape);
  cuda::Gather<T, Codeword> wanted{given.codewords.data(),
                                   given.indices.data(),
                                   found.quantized.data(),
                                   found.counts.data(),
                                   {},
                                   0,
                                   0,
                                   false};
  const int64_t blocks = cuda::divide_rows(wanted, given.shape, kPiece, most_blocks);
  wanted.error = found.total(blocks);
  emulation::launch(static_cast<unsigned>(blocks), cuda::kThreads, cuda::gather<T, Codeword, kPiece>,
                    given.x.data(), given.shape, wanted);
  check(what, given, found, false);
}

// With at least one codeword per row of a block, no rows are sorted.
template <class T, class Codeword>
static void row_sums(const char* what, const SumsCase<T, Codeword>& given, int64_t most_blocks) {
  double error = 0;
  for (const bool again : {false, true}) {
    KernelSums<T> found(given.shape);
    cuda::RowSums<T, Codeword> wanted{};
    wanted.indices = given.indices.data(), wanted.counts = found.counts.data(),
    wanted.sums = found.sums.data();
    wanted.scales = given.scales.data(), wanted.codewords = given.codewords.data(),
    wanted.quantized = found.quantized.data();
    wanted.largest = found.largest.data();
    const int64_t blocks = cuda::divide_rows(wanted, given.shape, most_blocks);
    wanted.error = found.total(blocks);
    emulation::launch(static_cast<unsigned>(blocks), 96, cuda::row_sums<T, true, Codeword>, given.x.data(),
                      given.shape, wanted);
    if (again) {
      CHECK(bits(found.error) == bits(error), "%s: another error", what);
    } else {
      check(what, given, found, true);
    }
    error = found.error;
  }
}

// Checks every element type, one element at a time, and in pieces of 16 bytes if the rows allow it.
template <class T, class Codeword, int kPiece = 1>
static void vq(const char* what, const cuda::Shape& shape, int64_t elements, int64_t blocks,
               int taken = 1 << 30) {
  const SumsCase<T, Codeword> given(shape, elements, static_cast<int>(elements), taken);
  gather<1>(what, given, blocks);
  if constexpr (kPiece > 1) gather<kPiece>(what, given, blocks);
  row_sums(what, given, blocks);
}

static void vq_of_all_shapes() {
  const auto flat = [](int64_t rows, int64_t segments, int64_t codebooks, int64_t d, int64_t k) {
    return cuda::Shape{rows * segments, segments, codebooks, d, k, 0, rows, 0, segments * d, 1, true};
  };
  vq<float, float>("one", flat(1, 1, 1, 1, 1), 1, 9);
  vq<float, float>("one element", flat(70, 1, 1, 1, 9), 70, 9);
  vq<float, float>("three elements", flat(300, 1, 1, 3, 9), 900, 2);
  vq<float, float, 4>("four elements", flat(300, 1, 1, 4, 9), 1200, 1);
  vq<float, float, 4>("60 elements", flat(500, 1, 1, 60, 20), 500 * 60, 3);
  vq<float, float, 4>("a long row", flat(9, 1, 1, 4400, 3), 9 * 4400, 2);
  vq<float, float, 4>("many codewords", flat(600, 1, 1, 8, 5000), 600 * 8, 2);
  vq<float, float, 4>("one codeword takes all", flat(600, 1, 1, 8, 70), 600 * 8, 2, 1);
  vq<_Float16, float, 8>("float16", flat(400, 1, 1, 72, 30), 400 * 72, 2);
  vq<emulation::Bfloat16, float, 8>("bfloat16", flat(400, 1, 1, 24, 30), 400 * 24, 2);
  vq<_Float16, double>("float16, wide", flat(90, 1, 1, 7, 4), 90 * 7, 2);
  vq<float, double>("wide", flat(90, 1, 1, 7, 4), 90 * 7, 2);
  vq<double, float>("double", flat(150, 1, 1, 70, 20), 150 * 70, 2);
  vq<double, double>("double, wide", flat(150, 1, 1, 17, 20), 150 * 17, 2);
  vq<float, float, 4>("segments", flat(150, 3, 1, 4, 20), 150 * 12, 2);
  vq<float, float, 4>("codebooks", flat(240, 3, 3, 4, 20), 240 * 12, 3);
  vq<float, float, 4>("rows with gaps", {140, 1, 1, 8, 9, 0, 70, 1500, 20, 1, true}, 3000, 2);
  vq<float, float>("channels first", {280, 2, 1, 6, 9, 0, 70, 840, 1, 70, true}, 280 * 6, 2);
  vq<float, float>("long channels first", {140, 1, 1, 130, 9, 0, 70, 9100, 1, 70, true}, 140 * 130, 2);
  with_far_memory([] {
    constexpr int64_t kApart = int64_t{1} << 28, kFar = int64_t{5} << 30;
    vq<float, float, 4>("rows far apart", {70, 1, 1, 8, 9, 0, 35, kFar, kApart / 2, 1, true}, 2 * kFar, 2);
    vq<float, float>("elements far apart", {140, 2, 2, 9, 9, 0, 35, 18 * kApart, 1, kApart, true},
                     36 * kApart + 35, 2);
  });
}

// Rows are not finite, or have errors that are too large or too small for float32.
static void hard_rows() {
  const cuda::Shape shape{40, 1, 1, 8, 5, 0, 40, 0, 8, 1, true};
  for (const double value : {double{NAN}, double{INFINITY}, -double{INFINITY}, 1e30}) {
    SumsCase<float, float> given(shape, 320, 3);
    given.x[7 * 8 + 3] = static_cast<float>(value);
    KernelSums<float> found(shape);
    gather<1>("hard", given, 1);
    gather<4>("hard", given, 1);
    if (value == 1e30) continue;                   // its sum has no meaning
    for (double& scale : given.scales) scale = 0;  // a sum with a NaN or an infinity has no meaning
    cuda::RowSums<float, float> wanted{};
    wanted.indices = given.indices.data(), wanted.counts = found.counts.data(),
    wanted.sums = found.sums.data();
    wanted.scales = given.scales.data(), wanted.codewords = given.codewords.data(),
    wanted.quantized = found.quantized.data();
    wanted.largest = found.largest.data();
    wanted.error = found.total(cuda::divide_rows(wanted, shape, 1));
    emulation::launch(1, 64, cuda::row_sums<float, true, float>, given.x.data(), shape, wanted);
    CHECK(found.largest[given.indices[7]] == bits(INFINITY), "%g", value);
    CHECK(std::isnan(value) ? std::isnan(found.error) : std::isinf(found.error), "%g: %g", value,
          found.error);
  }
  SumsCase<float, float> tiny(shape, 320, 4);
  for (int64_t i = 0; i < 320; ++i) tiny.x[i] *= 1e-30f;
  for (float& value : tiny.codewords) value *= 1e-30f;
  for (double& scale : tiny.scales) scale = 0x1p120;
  gather<4>("tiny", tiny, 1);
  row_sums("tiny", tiny, 1);
}

// Returns the exponent of the unit of a codeword, written out from ops/vq/composed.py.
static int unit_exponent(int64_t rows, double codeword, double largest) {
  const auto exponent = [](double value) { return value == 0 ? 0 : std::max(std::ilogb(value) + 1, -900); };
  const int digits = 62 - static_cast<int>(std::ceil(std::log2(static_cast<double>(rows)))),
            expected = digits - exponent(codeword) - 3, needed = digits - exponent(largest);
  return 0 <= needed - expected && needed - expected <= digits - 31 ? expected : needed;
}

// Sums rows in units that the kernels choose, and compares the bits. `factor` scales the rows of a codeword.
template <class T, class Codeword, class Factor>
static void units(const char* what, const cuda::Shape& shape, int64_t elements, const Factor& factor) {
  SumsCase<T, Codeword> given(shape, elements, 11);
  const int64_t codewords = shape.codebooks * shape.k, d = shape.d;
  std::vector<double> reach(codewords), largest(codewords), expected(codewords * d);
  for (int64_t i = 0; i < codewords * d; ++i) {
    const double size = std::fabs(static_cast<double>(given.codewords[i]));
    reach[i / d] = std::max(reach[i / d], size);
  }
  for (int64_t i = 0; i < shape.outputs * d; ++i) {
    T& element = given.x[shape.begin(i / d) + i % d * shape.stride];
    element = static_cast<T>(static_cast<double>(element) * factor(given.code(i / d)));
    double& most = largest[given.code(i / d)];
    const double size = std::fabs(static_cast<double>(element));
    most = std::isfinite(size) ? std::max(most, size) : INFINITY;
  }
  for (int64_t code = 0; code < codewords; ++code) {
    const int exponent =
        unit_exponent(shape.outputs, reach[code], std::isfinite(largest[code]) ? largest[code] : 0);
    std::vector<long long> sums(d);
    for (int64_t output = 0; output < shape.outputs && std::isfinite(largest[code]); ++output) {
      for (int64_t j = 0; j < d && given.code(output) == code; ++j)
        sums[j] += std::llrint(std::ldexp(given.element(output, j), exponent));
    }
    for (int64_t j = 0; j < d; ++j)
      expected[code * d + j] =
          std::isfinite(largest[code]) ? std::ldexp(static_cast<double>(sums[j]), -exponent) : NAN;
  }

  KernelSums<T> found(shape);
  long long again = 0;
  const cuda::SumUnits wanted{cuda::digits_of(shape.outputs),
                              codewords,
                              given.scales.data(),
                              given.indices.data(),
                              found.largest.data(),
                              found.sums.data(),
                              &again};
  emulation::launch(2, 64, cuda::expect_units<Codeword>, given.codewords.data(), d, wanted);
  cuda::RowSums<T, Codeword> rows{};
  rows.indices = given.indices.data(), rows.counts = found.counts.data(), rows.sums = found.sums.data();
  rows.scales = given.scales.data(), rows.codewords = given.codewords.data();
  rows.quantized = found.quantized.data(), rows.largest = found.largest.data();
  const int64_t blocks = cuda::divide_rows(rows, shape, 2);
  rows.error = found.total(blocks);
  emulation::launch(static_cast<unsigned>(blocks), 96, cuda::row_sums<T, true, Codeword>, given.x.data(),
                    shape, rows);
  emulation::launch_cooperative(2, 64, cuda::finish_sums<T>, given.x.data(), shape, wanted);
  int64_t wrong = 0;
  for (int64_t i = 0; i < codewords * d; ++i) {
    const bool none = std::isnan(expected[i]);
    wrong += none ? !std::isnan(std::bit_cast<double>(found.sums[i])) : found.sums[i] != bits(expected[i]);
  }
  CHECK(wrong == 0, "%s: %ld sums", what, static_cast<long>(wrong));
  const auto changed = [&](double scale) { return scale < 0; };
  CHECK(again == std::any_of(given.scales.begin(), given.scales.end(), changed), "%s: again", what);
}

static void units_of_sums() {
  const cuda::Shape flat{200, 1, 1, 5, 7, 0, 200, 0, 5, 1, true};
  const cuda::Shape books{240, 3, 3, 4, 20, 0, 80, 0, 12, 1, true};
  const auto each = [](std::vector<double> factors) {
    return [factors](int64_t code) { return factors[static_cast<size_t>(code) % factors.size()]; };
  };
  units<float, float>("as expected", flat, 1000, each({1}));
  units<float, float>("too large", flat, 1000, each({1, 1e3, 1e30}));
  units<float, float>("too small", flat, 1000, each({1e-30, 1, 1e-5}));
  units<float, float>("zero", flat, 1000, each({0, 1}));
  units<float, float>("not finite", flat, 1000, each({1, NAN, 1e9, INFINITY}));
  units<double, double>("float64", flat, 1000, each({1, 1e300, 1e-300, 1e-200}));
  units<_Float16, float>("float16", flat, 1000, each({1, 100}));
  units<float, float>("books", books, 960, each({1, 1e6}));
  units<float, float>("channels first", {280, 2, 1, 6, 9, 0, 70, 840, 1, 70, true}, 280 * 6, each({1, 1e6}));
}

// The results of a step of k-means: masses, and sums minus a middle in units of each column.
constexpr double kMassScale = 0x1.8p40;
template <class T>
static KernelSums<T> masses_and_sums(const SumsCase<T, float>& given, const std::vector<double>& middle,
                                     const std::vector<double>& scales, const double* weights) {
  KernelSums<T> found(given.shape);
  cuda::RowSums<T, float> wanted{};
  wanted.indices = given.indices.data(), wanted.counts = found.counts.data(), wanted.sums = found.sums.data();
  wanted.scales = scales.data(), wanted.middle = middle.data(), wanted.mass_scale = &kMassScale,
  wanted.weights = weights;
  const int64_t blocks = cuda::divide_rows(wanted, given.shape, 5);
  emulation::launch(static_cast<unsigned>(blocks), 96, cuda::row_sums<T, false, float>, given.x.data(),
                    given.shape, wanted);
  return found;
}

// Checks a step with and without weights.
template <class T>
static void k_means(int64_t d, int64_t n = 250, int64_t apart = 0) {
  std::mt19937 random(4);
  const int64_t k = 9, row_stride = std::max(d, apart);
  const SumsCase<T, float> given({n, 1, 1, d, k, 0, n, 0, row_stride, 1, true}, n * row_stride, 5);
  const auto middle = normal<double>(d, random, 3);
  std::vector<double> weights(n), scales(d);
  for (int64_t i = 0; i < n; ++i) weights[i] = i % 3 ? 1.0 / static_cast<double>(1 + i) : 0;
  for (int64_t j = 0; j < d; ++j) scales[j] = std::ldexp(1, static_cast<int>(20 + j % 20));
  for (const bool weighted : {false, true}) {
    const KernelSums<T> found = masses_and_sums(given, middle, scales, weighted ? weights.data() : nullptr);
    std::vector<long long> masses(k), sums(k * d);
    for (int64_t i = 0; i < n; ++i) {
      const double weight = weighted ? weights[i] : 1;
      masses[given.indices[i]] += std::llrint(weight * kMassScale);
      for (int64_t j = 0; j < d; ++j) {
        sums[given.indices[i] * d + j] += std::llrint((given.element(i, j) - middle[j]) * weight * scales[j]);
      }
    }
    CHECK(found.counts == masses && found.sums == sums, "weighted %d, d %ld", weighted, static_cast<long>(d));
  }
}

// A GPU does not look for such rows: the inertia shows them, and no other cluster changes.
static void rows_that_are_not_finite() {
  const int64_t n = 70, d = 5, k = 4, row = 37;
  const cuda::Shape shape{n, 1, 1, d, k, 0, n, 0, d, 1, true};
  const std::vector<double> middle(d, 1), scales(d, 0x1p30);
  SumsCase<float, float> given(shape, n * d, 6);
  const KernelSums<float> before = masses_and_sums(given, middle, scales, nullptr);
  for (const float value : {NAN, INFINITY}) {
    given.x[row * d + 2] = value;
    const KernelSums<float> found = masses_and_sums(given, middle, scales, nullptr);
    CHECK(found.counts == before.counts, "%g", static_cast<double>(value));
    for (int64_t i = 0; i < k * d; ++i) {
      CHECK(found.sums[i] == before.sums[i] || i == given.indices[row] * d + 2, "%g: sum %ld",
            static_cast<double>(value), static_cast<long>(i));
    }
    std::vector<double> squares(n, 0);
    double total = 0;
    emulation::launch(2, 64, cuda::row_squares<float, float>, given.x.data(), shape, given.codewords.data(),
                      given.indices.data(), static_cast<const double*>(nullptr), squares.data());
    for (int64_t i = 0; i < n; ++i)
      CHECK(std::isfinite(squares[i]) == (i != row), "square %ld", static_cast<long>(i));
    emulation::launch(1, 64, cuda::fold, squares.data(), n, int64_t{4}, &total);
    CHECK(!std::isfinite(total), "an inertia of %g", total);
  }
}

// The ranges have each row once, and at most the rows that a block sorts.
static void ranges() {
  for (const int64_t outputs :
       {int64_t{1}, int64_t{1000}, int64_t{1000000}, int64_t{30000000}, (int64_t{1} << 33) + 1}) {
    for (const int64_t d : {1, 64, 65, 4096}) {
      for (const int64_t k : {2, 256, 2048, 2049}) {
        cuda::RowSums<float, float> wanted{};
        const cuda::Shape shape{outputs, 1, 1, d, k, 0, outputs, 0, d, 1, true};
        const int64_t columns = (d + 63) / 64, blocks = cuda::divide_rows(wanted, shape, 264);
        CHECK(blocks % columns == 0 && blocks / columns * wanted.rows >= outputs &&
                  (blocks / columns - 1) * wanted.rows < outputs,
              "%ld rows of %ld, %d to a block", static_cast<long>(outputs), static_cast<long>(d),
              wanted.rows);
        CHECK(
            wanted.rows <= cuda::kMostRows && cuda::sort_bytes(wanted, shape, cuda::kSumThreads) <= 100 << 10,
            "%d", wanted.rows);
        CHECK(blocks <= INT32_MAX, "%ld blocks", static_cast<long>(blocks));
        cuda::Gather<float, float> copied{};
        const int64_t tiles = cuda::divide_rows(copied, shape, 1, 396),
                      each = int64_t{copied.tile} * (cuda::kThreads / cuda::kWarp);
        CHECK(0 < tiles && tiles <= 396 && (tiles == 396 || tiles * each >= outputs), "%ld blocks",
              static_cast<long>(tiles));
      }
    }
  }
}

// Writes out square_norms() and tree_sum() in ops/kmeans_step/composed.py, and compares the bits.
static void inertia() {
  std::mt19937 random(5);
  for (const int64_t n : {1, 2, 5, 150}) {
    const int64_t d = 19, k = 3;
    const auto x = normal<float>(n * d, random), centers = normal<float>(k * d, random);
    const auto weights = normal<double>(n, random, 9);
    std::vector<int64_t> labels(n);
    for (int64_t i = 0; i < n; ++i) labels[i] = i % k;
    std::vector<double> squares(n, NAN), expected(n);
    for (int64_t i = 0; i < n; ++i) {
      double part[8] = {};
      for (int64_t j = 0; j < d; ++j) {
        const double difference = static_cast<double>(x[i * d + j]) - centers[labels[i] * d + j];
        part[j % 8] += difference * difference;
      }
      for (int64_t half = 4; half > 0; half /= 2) {
        for (int64_t j = 0; j < half; ++j) part[j] += part[j + half];
      }
      expected[i] = weights[i] * part[0];
    }
    const cuda::Shape shape{n, 1, 1, d, k, 0, n, 0, d, 1, true};
    emulation::launch(2, 64, cuda::row_squares<float, float>, x.data(), shape, centers.data(), labels.data(),
                      weights.data(), squares.data());
    CHECK(same(squares, expected), "squares of %ld rows", static_cast<long>(n));
  }
  for (const int64_t n : {1, 2, 3, 31, 33, 1000, 1024, 1025, 40000}) {
    const auto values = normal<double>(n, random, 9);
    std::vector<double> folded = values, expected(std::bit_ceil(static_cast<uint64_t>(n)));
    std::copy(values.begin(), values.end(), expected.begin());
    for (size_t half = expected.size() / 2; half > 0; half /= 2) {
      for (size_t i = 0; i < half; ++i) expected[i] += expected[i + half];
    }
    double total = NAN;
    constexpr int64_t kBlock = 64;
    for (int64_t left = n, size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));;) {
      size = std::max<int64_t>(size / cuda::kFolded, 1);
      const int64_t blocks = (size + kBlock - 1) / kBlock;
      emulation::launch(static_cast<unsigned>(blocks), kBlock, cuda::fold, folded.data(), left, size, &total);
      if (blocks == 1) break;
      left = size;
    }
    CHECK(bits(total) == bits(expected[0]), "%ld values: %a, expected %a", static_cast<long>(n), total,
          expected[0]);
  }
}

void run() {
  vq_of_all_shapes();
  hard_rows();
  units_of_sums();
  k_means<float>(17);
  k_means<float>(64);
  k_means<_Float16>(100);
  k_means<double>(65);
  k_means<emulation::Bfloat16>(33);
  with_far_memory([] { k_means<float>(19, 40, int64_t{1} << 26); });
  rows_that_are_not_finite();
  ranges();
  inertia();
}
