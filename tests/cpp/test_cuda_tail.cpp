// What follows the CUDA searches in vq and in a step of k-means, run on the CPU thread by thread: on tensor cores and in float32, against
// sums written out. The emulation comes before the kernels.
#include <bit>
#include <cmath>

#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_hopper.h"
#include "cuda/emulation_mma.h"
#include "cuda/halves.h"
#include "cuda/kmeans_step_kernels.h"
#include "cuda/vq_assign_deep.h"
#include "cuda/vq_assign_tensor.h"
#include "cuda/vq_assign_wgmma.h"

namespace cuda = uefl::cuda;

enum class Search { float32, mma, deep, wgmma };
constexpr Search kSearches[] = {Search::float32, Search::mma, Search::deep, Search::wgmma};
static int by_wgmma = 0;

// Room for all that a search and its tail write; NaN, or a number that is none, where it must be overwritten.
template <class T>
struct Run {
  Run(const T* x, cuda::Shape given, const std::vector<float>& codebook) : x(x), shape(given), codes(codebook) {
    shape.padded_k = (shape.k + cuda::kCodes - 1) / cuda::kCodes * cuda::kCodes;
    const int64_t size = shape.books * shape.d * shape.padded_k;
    exact.assign(size, NAN), bounds.assign(2 * shape.books, NAN), centred.assign(size, NAN);
    half_norms.assign(shape.books * shape.padded_k, NAN), mean.assign(shape.books * shape.d, NAN);
    packed = {exact.data(), bounds.data(), centred.data(), half_norms.data(), mean.data()};
    const auto blocks = [](int64_t threads) { return static_cast<unsigned>((threads + 63) / 64); };
    emulation::launch(blocks(32 * shape.books * shape.k), 64, cuda::pack_exact<float>, codes.data(), shape, packed);
    emulation::launch(blocks(32 * shape.books * shape.d), 64, cuda::pack_centred, shape, packed);
    emulation::launch(blocks(shape.books * shape.padded_k), 64, cuda::pack_norms, shape, packed);
    quantized.assign(shape.outputs * shape.d, T(NAN)), errors.assign(cuda::places(shape), 0);
    counts.assign(shape.books * shape.k, 0), largest = counts, sums.assign(counts.size() * shape.d, 0);
    indices.assign(shape.outputs, -2), open.assign(shape.outputs, 7);
  }

  cuda::Tail tail() {
    cuda::Tail tail{};
    tail.codes = codes.data(), tail.quantized = quantized.data(), tail.errors = errors.data();
    tail.counts = counts.data(), tail.open = open.data();
    return tail;
  }

  // False where this search does not take such rows.
  bool search(Search which, const cuda::Tail& tail) {
    if (which == Search::float32) {
      emulation::launch(2, cuda::kThreads, cuda::search<T>, x, shape, packed, true, indices.data(), cuda::Selection{});
      std::fill(open.begin(), open.end(), 1);  // as cuda/vq_assign.cu does for this search
    } else if (which == Search::mma) {
      const Halves halves(shape, packed, shape.padded_k, cuda::Tiling<2>::kWidth, false);
      emulation::launch(2, cuda::kThreads, cuda::search_tensor<T, 2>, x, shape, packed, halves.arrays, true, indices.data(), tail);
      search_listed(halves);
    } else if (which == Search::deep) {
      const Halves halves = Halves::in_blocks(shape, packed);
      emulation::launch(2, cuda::kThreads, cuda::search_deep<T>, x, shape, packed, halves.arrays, true, indices.data(), tail);
      search_listed(halves);
    } else if constexpr (sizeof(T) <= sizeof(float)) {
      if (!cuda::rows_in_bulk(shape, x, sizeof(T))) return false;
      const Halves halves = Halves::in_blocks(shape, packed);
      const cuda::Stages stages = cuda::divide(shape, halves.arrays.padded_k, sizeof(T), 227 * 1024);
      emulation::launch_groups(2, cuda::kWgmmaThreads, cuda::search_wgmma<T>, x, shape, packed, halves.arrays, stages, true, indices.data(),
                               tail);
      search_listed(halves);
    } else {
      return false;
    }
    emulation::launch(1, 64, cuda::rescore<T>, x, shape, packed, indices.data());
    emulation::launch(2, 64, cuda::finish_open<T>, x, shape, tail, indices.data());
    return true;
  }

  double error() const {
    double total = 0;
    for (const double part : errors) total += part;
    return total;
  }

  const T* x;
  cuda::Shape shape;
  cuda::Packed packed;
  std::vector<float> codes, centred, half_norms, mean;
  std::vector<double> exact, bounds, errors;
  std::vector<T> quantized;
  std::vector<long long> counts, largest, sums;
  std::vector<int64_t> indices;
  std::vector<unsigned char> open;

 private:
  void search_listed(const Halves& halves) {
    emulation::launch(1, cuda::kThreads, cuda::search<T>, x, shape, packed, true, indices.data(), halves.selection());
  }
};

static int64_t left_open = 0, closed = 0;  // rows that the tensor cores did not finish, and did: there must be some of both

static long long bits(double value) { return __double_as_longlong(value); }

// Element j of a row of x.
template <class T>
static double element(const Run<T>& run, int64_t output, int64_t j) {
  return static_cast<double>(run.x[run.shape.begin(output) + j * run.shape.stride]);
}

template <class T>
static void check_vq(const char* what, const Run<T>& run, const std::vector<double>& scales) {
  const cuda::Shape& shape = run.shape;
  std::vector<long long> counts(run.counts.size()), largest(counts.size()), sums(run.sums.size());
  double error = 0;
  int64_t wrong = 0;
  for (int64_t output = 0; output < shape.outputs; ++output) {
    const int64_t code = output % shape.books * shape.k + run.indices[output];
    ++counts[code];
    for (int64_t j = 0; j < shape.d; ++j) {
      const double value = element(run, output, j), target = run.codes[code * shape.d + j];
      const double magnitude = std::isfinite(value) ? std::fabs(value) : INFINITY;
      largest[code] = std::max(largest[code], bits(magnitude));
      sums[code * shape.d + j] += std::llrint(value * scales[code]);
      error += (value - target) * (value - target);
      wrong += run.quantized[output * shape.d + j] != static_cast<T>(target);
    }
  }
  CHECK(wrong == 0, "%s: %ld elements of quantized", what, static_cast<long>(wrong));
  CHECK(run.counts == counts && run.largest == largest && run.sums == sums, "%s: counts, largest or sums", what);
  CHECK(std::fabs(run.error() - error) <= 1e-12 * error, "%s: error %g, expected %g", what, run.error(), error);
}

template <class T>
static void vq(const char* what, const std::vector<T>& x, const cuda::Shape& shape, const std::vector<float>& codebook) {
  std::vector<double> scales(shape.books * shape.k);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = std::ldexp(1, 30 + static_cast<int>(i % 5));
  std::vector<int64_t> expected;
  for (const Search which : kSearches) {
    Run<T> run(x.data(), shape, codebook);
    cuda::Tail tail = run.tail();
    tail.largest = run.largest.data(), tail.sums = run.sums.data(), tail.scales = scales.data();
    if (!run.search(which, tail)) continue;
    if (which != Search::float32) {
      for (const unsigned char row : run.open) left_open += row, closed += !row;
    }
    check_vq(what, run, scales);
    if (which == Search::float32) expected = run.indices;
    CHECK(run.indices == expected, "%s: search %d", what, static_cast<int>(which));
    by_wgmma += which == Search::wgmma;
  }
}

static void vq_of_all_shapes() {
  std::mt19937 random(1);
  const auto flat = [](int64_t rows, int64_t segments, int64_t books, int64_t d, int64_t k) {
    return cuda::Shape{rows * segments, segments, books, d, k, 0, rows, 0, segments * d, 1, true};
  };
  vq("one", normal<float>(1, random), flat(1, 1, 1, 1, 1), normal<float>(1, random));
  vq("one element", normal<float>(70, random), flat(70, 1, 1, 1, 9), normal<float>(9, random));
  vq("three elements", normal<float>(210, random), flat(70, 1, 1, 3, 9), normal<float>(27, random));
  vq("32 elements", normal<float>(300 * 32, random), flat(300, 1, 1, 32, 70), normal<float>(70 * 32, random));
  vq("double", normal<double>(150 * 17, random), flat(150, 1, 1, 17, 20), normal<float>(20 * 17, random));
  vq("segments", normal<float>(50 * 12, random), flat(50, 3, 1, 4, 20), normal<float>(20 * 4, random));
  vq("books", normal<float>(140 * 12, random), flat(140, 3, 3, 4, 20), normal<float>(3 * 20 * 4, random));
  vq("channels first", normal<float>(140 * 12, random), {280, 2, 1, 6, 9, 0, 70, 840, 1, 70, true}, normal<float>(9 * 6, random));
}

// Every row between two codewords, or all the same codeword: all of them are finished after the first pass.
static void ties() {
  std::mt19937 random(2);
  const auto row = normal<float>(20, random);
  std::vector<float> codebook;
  for (int i = 0; i < 7; ++i) codebook.insert(codebook.end(), row.begin(), row.end());
  vq("ties", normal<float>(90 * 20, random), {90, 1, 1, 20, 7, 0, 90, 0, 20, 1, true}, codebook);
}

static void rows_that_are_not_finite() {
  std::mt19937 random(3);
  for (const auto& [value, which] : {std::pair(NAN, Search::mma), {INFINITY, Search::deep}, {-INFINITY, Search::wgmma}}) {
    auto x = normal<float>(40 * 8, random);
    x[7 * 8 + 3] = value;
    Run<float> run(x.data(), {40, 1, 1, 8, 5, 0, 40, 0, 8, 1, true}, normal<float>(40, random));
    cuda::Tail tail = run.tail();
    const std::vector<double> scales(5, 1024);
    tail.largest = run.largest.data(), tail.sums = run.sums.data(), tail.scales = scales.data();
    run.search(which, tail);
    CHECK(run.indices[7] == 0 && run.largest[0] == bits(INFINITY), "%g", value);
    CHECK(std::isnan(value) ? std::isnan(run.error()) : std::isinf(run.error()), "%g", value);
    for (int j = 0; j < 8; ++j) CHECK(run.quantized[7 * 8 + j] == run.codes[j], "%g", value);
  }
}

// What a step of k-means asks for: masses, and sums less a middle in units of each column; with weights and without.
static void k_means() {
  std::mt19937 random(4);
  const int64_t n = 150, d = 17, k = 9;
  const auto x = normal<float>(n * d, random, 3);
  const auto middle = normal<double>(d, random, 3);
  std::vector<double> weights(n), scales(d);
  for (int64_t i = 0; i < n; ++i) weights[i] = i % 3 ? 1.0 / static_cast<double>(1 + i) : 0;
  for (int64_t j = 0; j < d; ++j) scales[j] = std::ldexp(1, static_cast<int>(20 + j));
  const double mass_scale = 0x1p40;
  for (const bool weighted : {false, true}) {
    for (const Search which : {Search::float32, Search::mma}) {
      Run<float> run(x.data(), {n, 1, 1, d, k, 0, n, 0, d, 1, true}, normal<float>(k * d, random, 3));
      cuda::Tail tail{};
      tail.counts = run.counts.data(), tail.sums = run.sums.data(), tail.open = run.open.data();
      tail.middle = middle.data(), tail.scales = scales.data(), tail.mass_scale = &mass_scale;
      tail.weights = weighted ? weights.data() : nullptr;
      run.search(which, tail);
      std::vector<long long> masses(k), sums(k * d);
      for (int64_t i = 0; i < n; ++i) {
        const double weight = weighted ? weights[i] : 1;
        masses[run.indices[i]] += std::llrint(weight * mass_scale);
        for (int64_t j = 0; j < d; ++j) {
          sums[run.indices[i] * d + j] += std::llrint((static_cast<double>(x[i * d + j]) - middle[j]) * weight * scales[j]);
        }
      }
      CHECK(run.counts == masses && run.sums == sums, "weighted %d, search %d", weighted, static_cast<int>(which));
    }
  }
}

// square_norms() and tree_sum() of ops/kmeans_step/reference.py, written out; to the bit.
static void inertia() {
  std::mt19937 random(5);
  for (const int64_t n : {1, 2, 5, 150}) {
    const int64_t d = 19, k = 3, size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));
    const auto x = normal<float>(n * d, random), centres = normal<float>(k * d, random);
    const auto weights = normal<double>(n, random, 9);
    std::vector<int64_t> labels(n);
    for (int64_t i = 0; i < n; ++i) labels[i] = i % k;
    std::vector<double> squares(n, NAN), expected(size);
    for (int64_t i = 0; i < n; ++i) {
      double part[8] = {};
      for (int64_t j = 0; j < d; ++j) {
        const double difference = static_cast<double>(x[i * d + j]) - centres[labels[i] * d + j];
        part[j % 8] += difference * difference;
      }
      for (int64_t half = 4; half > 0; half /= 2) {
        for (int64_t j = 0; j < half; ++j) part[j] += part[j + half];
      }
      expected[i] = weights[i] * part[0];
    }
    const cuda::Shape shape{n, 1, 1, d, k, 0, n, 0, d, 1, true};
    emulation::launch(2, 64, cuda::row_squares<float, float>, x.data(), shape, centres.data(), labels.data(), weights.data(),
                      squares.data());
    CHECK(std::equal(squares.begin(), squares.end(), expected.begin()), "squares of %ld rows", static_cast<long>(n));
    int64_t left = n;
    for (int64_t half = size / 2; half > 0; left = half, half /= 2) {
      emulation::launch(static_cast<unsigned>((half + 63) / 64), 64, cuda::add_halves, squares.data(), left, half);
      for (int64_t i = 0; i < half; ++i) expected[i] += expected[i + half];
    }
    CHECK(squares[0] == expected[0], "inertia of %ld rows: %a, expected %a", static_cast<long>(n), squares[0], expected[0]);
  }
}

void run() {
  inertia();
  vq_of_all_shapes();
  ties();
  rows_that_are_not_finite();
  k_means();
  CHECK(by_wgmma >= 4, "%d shapes by wgmma", by_wgmma);
  CHECK(left_open > 90 && closed > 90, "%ld rows were left open, %ld not", static_cast<long>(left_open), static_cast<long>(closed));
}
