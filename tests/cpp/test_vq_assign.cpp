// Compares Search with a plain definition, for the variant that UEFL_CPU names.
#include <cmath>
#include <thread>

#include "check.h"
#include "cpu/vq_assign.h"
#include "cpu/vq_prefilter.h"

using namespace uefl::cpu;

template <class T>
constexpr Dtype dtype = sizeof(T) == 4 ? Dtype::f32 : Dtype::f64;

template <class T, class C>
static void compare(const char* what, const std::vector<T>& x, const std::vector<C>& codewords, int64_t k,
                    int64_t d) {
  const int64_t n = static_cast<int64_t>(x.size()) / d;
  const Codebooks codebooks{codewords.data(), dtype<C>, 1, k, d};
  const bool narrow = dtype<T> == Dtype::f32 && dtype<C> == Dtype::f32;
  int64_t wrong = 0;
  for (const bool few : narrow ? std::vector<bool>{false, true} : std::vector<bool>{false}) {
    const Search search(codebooks, Metric::l2, true, "vq_assign", on_this_thread, few);
    std::vector<int64_t> indices(n, -1);
    search.assign({x.data(), dtype<T>, n, 1, d, d, 0, 1}, 0, n, indices.data());
    for (int64_t i = 0; i < n; ++i) wrong += indices[i] != nearest(&x[i * d], 1, codewords.data(), k, d);
  }
  CHECK(wrong == 0, "%s, K %ld, d %ld: %ld of %ld rows", what, static_cast<long>(k), static_cast<long>(d),
        static_cast<long>(wrong), static_cast<long>(n));
}

static void odd_shapes() {
  std::mt19937 random(2);
  for (const int64_t d : {1, 2, 3, 4, 5, 7, 8, 16, 33, 63, 64, 65, 100, 513}) {
    for (const int64_t k : {1, 2, 15, 16, 17, 31, 33, 255}) {
      for (const double offset : {0.0, 10.0, 1e3}) {
        compare("float", normal<float>(29 * d, random, offset), normal<float>(k * d, random, offset), k, d);
        compare("double", normal<double>(29 * d, random, offset), normal<double>(k * d, random, offset), k,
                d);
      }
      compare("mixed", normal<float>(29 * d, random), normal<double>(k * d, random), k, d);
    }
  }
}

// Rows are on the midpoint of two codewords, and one float away. Only the definition can tell them apart.
static void near_ties() {
  std::mt19937 random(3);
  const int64_t d = 24, k = 40, n = 400;
  const auto codewords = normal<float>(k * d, random, 5);
  std::vector<float> x(n * d);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t a = random() % k, b = random() % k, j = random() % d;
    for (int64_t e = 0; e < d; ++e) x[i * d + e] = (codewords[a * d + e] + codewords[b * d + e]) / 2;
    if (i % 3) x[i * d + j] = std::nextafter(x[i * d + j], i % 3 == 1 ? 1e9f : -1e9f);
  }
  compare("near ties", x, codewords, k, d);
}

// There are enough codewords for the variants with a prefilter, and more than one tile of rows.
static void large_codebooks() {
  std::mt19937 random(9);
  for (const auto& [d, k] : {std::pair<int64_t, int64_t>{64, 1100}, {70, 4500}, {520, 300}}) {
    auto codewords = normal<float>(k * d, random, 1);
    for (int64_t i = 0; i < 20 * d; ++i) codewords[(k - 20) * d + i] = codewords[i];
    auto x = normal<float>(220 * d, random, 1);
    for (int64_t i = 0; i < 20 * d; ++i) x[i] = (codewords[i] + codewords[i + 30 * d]) / 2;
    for (int64_t i = 40 * d; i < 60 * d; ++i) x[i] = codewords[i] + 1e-3f * x[i];
    compare("large codebook", x, codewords, k, d);
  }
}

// One codeword far from the others makes the bounds useless for the prefilter, which is then skipped. Rows
// near that codeword, and the rows after them, get the same results as other rows.
static void a_codeword_far_away() {
  std::mt19937 random(10);
  for (const int64_t d : {40, 300}) {
    const int64_t k = 200, n = 900;
    auto codewords = normal<float>(k * d, random), x = normal<float>(n * d, random);
    for (int64_t j = 0; j < d; ++j) codewords[77 * d + j] *= 1e4f;
    for (int64_t i = 0; i < 20 * d; ++i) x[300 * d + i] = codewords[77 * d + i % d] + x[i];
    compare("a codeword far away", x, codewords, k, d);
  }
}

static void duplicates_take_the_lowest_index() {
  std::mt19937 random(4);
  const int64_t d = 9, k = 70;
  auto codewords = normal<float>(k * d, random);
  for (int64_t i = 35 * d; i < k * d; ++i) codewords[i] = codewords[i - 35 * d];
  compare("duplicates", normal<float>(200 * d, random), codewords, k, d);
  compare("rows equal to codewords", codewords, codewords, k, d);
  compare("all equal", std::vector<float>(50 * d, 0.1f), std::vector<float>(k * d, 0.1f), k, d);
}

static void extreme_values() {
  std::mt19937 random(5);
  const int64_t d = 6, k = 20;
  for (const double scale : {1e-45, 1e-40, 1e-30, 1e-20, 1e10, 1e18, 1e19, 1e30, 3e37}) {
    compare("scale", normal<float>(60 * d, random, 0, scale), normal<float>(k * d, random, 0, scale), k, d);
    compare("far rows", normal<float>(60 * d, random, 0, scale), normal<float>(k * d, random), k, d);
  }
  for (const double scale : {1e-310, 1e-200, 1e-60, 1e60, 1e140}) {
    compare("double scale", normal<double>(60 * d, random, 0, scale), normal<double>(k * d, random, 0, scale),
            k, d);
  }
  auto x = normal<float>(60 * d, random);
  const float infinity = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < 60; i += 4) x[i * d + i % d] = nan;
  for (int64_t i = 1; i < 60; i += 4) x[i * d + i % d] = i % 8 == 1 ? infinity : -infinity;
  compare("NaN and infinity", x, normal<float>(k * d, random), k, d);
}

static void strides_and_segments() {
  std::mt19937 random(6);
  const int64_t a = 5, b = 7, s = 3, d = 11, k = 19;
  const auto x = normal<float>(a * b * s * d, random);
  for (const bool shared : {true, false}) {
    const auto codewords = normal<float>((shared ? 1 : s) * k * d, random);
    const Search search({codewords.data(), Dtype::f32, shared ? 1 : s, k, d}, Metric::l2, true);
    const StridedRows channels_first{x.data(), Dtype::f32, a, b, s * d, b * s * d, 1, b},
        dense{x.data(), Dtype::f32, a * b, 1, s * d, s * d, 0, 1};
    for (const StridedRows& given : {channels_first, dense}) {
      const StridedRows rows = search.flatten_segments(given);
      std::vector<int64_t> indices(a * b * s, -1);
      search.assign(rows, 0, rows.outer * rows.inner, indices.data());
      for (int64_t i = 0; i < a * b * s; ++i) {
        const float* row = x.data() + i / (b * s) * given.outer_stride * (given.inner == 1 ? 0 : 1) +
                           (given.inner == 1 ? i / s * given.outer_stride : i / s % b) +
                           i % s * d * given.dim_stride;
        const int64_t expected =
            nearest(row, given.dim_stride, codewords.data() + (shared ? 0 : i % s * k * d), k, d);
        CHECK(indices[i] == expected, "shared %d, position %ld", shared, static_cast<long>(i));
      }
    }
  }
}

static void any_split_of_the_rows_gives_the_same() {
  std::mt19937 random(7);
  const int64_t n = 101, d = 20, k = 50;
  const auto x = normal<float>(n * d, random), codewords = normal<float>(k * d, random);
  const Search search({codewords.data(), Dtype::f32, 1, k, d}, Metric::cosine, true);
  const StridedRows rows{x.data(), Dtype::f32, n, 1, d, d, 0, 1};
  std::vector<int64_t> whole(n), split(n);
  search.assign(rows, 0, n, whole.data());
  std::thread other([&] { search.assign(rows, 0, 37, split.data()); });
  search.assign(rows, 37, 38, split.data());
  search.assign(rows, 38, n, split.data());
  other.join();
  CHECK(whole == split, "cosine search of 101 rows");
}

static void a_codebook_that_is_not_finite_is_refused() {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(), -0x1p481}) {
    const double codewords[4] = {0, 1, bad, 2};
    bool refused = false;
    try {
      Search({codewords, Dtype::f64, 1, 2, 2}, Metric::l2, true);
    } catch (const std::runtime_error&) {
      refused = true;
    }
    CHECK(refused, "codebook with %g", bad);
  }
}

static void phases_that_count_codewords_differently_are_refused() {
  const SearchPlan own = plan(512, 512);
  check_blocks(own);
  PrefilterKernel other{};
  other.block_codewords = own.kernel->block_codewords;
  check_blocks({own.isa, own.kernel, &other});
  other.block_codewords *= 2;
  std::string message;
  try {
    check_blocks({own.isa, own.kernel, &other});
  } catch (const std::logic_error& error) {
    message = error.what();
  }
  for (const int64_t got : {other.block_codewords, own.kernel->block_codewords})
    CHECK(message.find(std::to_string(got) + " in ") != std::string::npos, "'%s'", message.c_str());
}

void run() {
  odd_shapes();
  near_ties();
  large_codebooks();
  a_codeword_far_away();
  duplicates_take_the_lowest_index();
  extreme_values();
  strides_and_segments();
  any_split_of_the_rows_gives_the_same();
  a_codebook_that_is_not_finite_is_refused();
  phases_that_count_codewords_differently_are_refused();
}
