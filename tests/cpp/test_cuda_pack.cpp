// Runs the launch that packs a codebook on the CPU, and checks the results of its two halves for any number
// of blocks.
#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_mma.h"
#include "cuda/packed.h"
#include "cuda/vq_assign_scores.h"

namespace cuda = uefl::cuda;

template <class T>
static bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Compares the starts. The places between the lanes belong to no codeword.
static bool same_starts(const cuda::Shape& shape, const TestCodebook& a, const TestCodebook& b) {
  for (int64_t i = 0; i < shape.codebooks * shape.padded_k; ++i) {
    const int64_t codebook = i / shape.padded_k;
    const auto code = static_cast<int>(i % shape.padded_k);
    const int first_tile = cuda::first_tile_of(shape, codebook);
    if (std::memcmp(cuda::start_of(a.packed, first_tile, code), cuda::start_of(b.packed, first_tile, code),
                    sizeof(float)) != 0)
      return false;
  }
  return true;
}

static cuda::Shape shape_of(int64_t rows, int64_t codebooks, int64_t d, int64_t k, bool euclidean) {
  const int64_t padded = (k + cuda::kBlockCodewords - 1) / cuda::kBlockCodewords * cuda::kBlockCodewords;
  return {rows * codebooks, codebooks, codebooks, d, k, padded, rows, 0, codebooks * d, 1, euclidean};
}

// One block waits for no other one. Five blocks must not read what another one has not written.
static void the_number_of_blocks_changes_no_bit() {
  std::mt19937 random(20);
  for (const bool euclidean : {true, false}) {
    for (const auto& [codebooks, d, k] :
         {std::array<int64_t, 3>{1, 70, 300}, {3, 17, 130}, {2, 1, 1}, {1, 300, 9}}) {
      const cuda::Shape shape = shape_of(40, codebooks, d, k, euclidean);
      const auto x = normal<float>(40 * codebooks * d, random),
                 codewords = normal<float>(codebooks * k * d, random, 3);
      const TestCodebook one(codewords, shape, x.data(), 1), five(codewords, shape, x.data(), 5);
      const bool same = same_bits(one.exact, five.exact) && same_bits(one.bounds, five.bounds) &&
                        same_bits(one.center, five.center) && same_bits(one.halves, five.halves) &&
                        same_starts(shape, one, five);
      CHECK(same, "codebooks %ld, d %ld, K %ld", static_cast<long>(codebooks), static_cast<long>(d),
            static_cast<long>(k));
      CHECK(one.ones == std::vector<long long>(one.ones.size(), 0) && five.ones == one.ones,
            "what later kernels add to");
    }
  }
}

// Compares the numbers on which the certificate is based with float64 on the CPU. A codeword that is not
// finite does not count.
static void bounds_hold() {
  std::mt19937 random(21);
  const int64_t codebooks = 2, d = 33, k = 200, rows = 3000;
  const cuda::Shape shape = shape_of(rows, codebooks, d, k, true);
  auto x = normal<float>(rows * codebooks * d, random),
       codewords = normal<float>(codebooks * k * d, random, 2);
  codewords[5 * d + 3] = NAN, codewords[(k + 7) * d] = INFINITY;
  for (int64_t j = 0; j < d; ++j) codewords[90 * d + j] *= 40, x[j] = NAN;
  const TestCodebook found(codewords, shape, x.data(), 4);
  for (int64_t codebook = 0; codebook < codebooks; ++codebook) {
    double longest = 0;
    const cuda::ScoreBase base = cuda::base_of(&found.bounds[4 * codebook]);
    for (int64_t code = 0; code < k; ++code) {
      double square = 0;
      for (int64_t j = 0; j < d; ++j) {
        const double b = static_cast<double>(codewords[(codebook * k + code) * d + j]) -
                         static_cast<double>(found.center[codebook * d + j]);
        square += b * b;
      }
      const float start =
          *cuda::start_of(found.packed, cuda::first_tile_of(shape, codebook), static_cast<int>(code));
      if (!std::isfinite(square)) {
        CHECK(start == cuda::kNever, "a codeword that is not finite has %g", static_cast<double>(start));
        continue;
      }
      CHECK(std::fabs(start - static_cast<double>(base.base) - square / 2) <= base.unit + 1e-6 * square,
            "half of the square of codeword %ld", static_cast<long>(code));
      longest = std::max(longest, std::sqrt(square));
    }
    const double* bounds = &found.bounds[4 * codebook];
    const double unit = std::exp2(14 - std::floor(std::log2(longest)));
    CHECK(std::fabs(bounds[1] / longest - 1) < 1e-12 &&
              std::fabs(bounds[0] / (longest * longest / 2) - 1) < 1e-12,
          "G %g, H %g", bounds[1], bounds[0]);
    CHECK(0 < bounds[2] && bounds[2] <= 1.01 * 0x1p-11 * longest * unit, "T %g", bounds[2]);
    CHECK(5 < bounds[3] && bounds[3] < 40, "the longest of the sampled rows %g", bounds[3]);
  }
}

// An offset is subtracted if it is large compared with the deviation, and kept if it is small.
static void the_center_is_that_of_columns_with_an_offset() {
  std::mt19937 random(22);
  const int64_t d = 80, k = 500;
  auto codewords = normal<float>(k * d, random);
  for (int64_t code = 0; code < k; ++code) codewords[code * d + 11] += 100, codewords[code * d + 79] -= 5;
  const TestCodebook found(codewords, shape_of(1, 1, d, k, true), codewords.data());
  for (int64_t j = 0; j < d; ++j) {
    const float center = found.center[j], offset = j == 11 ? 100 : j == 79 ? -5 : 0;
    CHECK(offset == 0 ? center == 0 : std::fabs(center - offset) < 1, "column %ld: %g", static_cast<long>(j),
          static_cast<double>(center));
  }
  const TestCodebook cosine(codewords, shape_of(1, 1, d, k, false), codewords.data());
  CHECK(cosine.center == std::vector<float>(d, 0), "cosine has none");
}

// One row that is far longer than the others does not change the scale and the base.
static void outliers_do_not_count() {
  std::mt19937 random(24);
  const int64_t d = 16, k = 50, rows = 2000;
  const auto codewords = normal<float>(k * d, random);
  auto x = normal<float>(rows * d, random);
  const TestCodebook without(codewords, shape_of(rows, 1, d, k, true), x.data());
  for (int64_t j = 0; j < d; ++j) x[700 * d + j] *= 1e5f;
  const TestCodebook with(codewords, shape_of(rows, 1, d, k, true), x.data());
  CHECK(with.sampled[350] > 1e5f, "row 700 is in the sample, with %g", double{with.sampled[350]});
  CHECK(without.bounds[3] <= with.bounds[3] && with.bounds[3] < 16 * without.bounds[3], "%g, and %g without",
        with.bounds[3], without.bounds[3]);
}

static void it_is_one_launch() {
  std::mt19937 random(23);
  const auto codewords = normal<float>(20 * 8, random);
  const unsigned before = emulation::launches;
  const TestCodebook found(codewords, shape_of(5, 1, 8, 20, true), codewords.data());
  CHECK(emulation::launches - before == 1, "%u launches", emulation::launches - before);
}

static cuda::RowScale found_scale;
static void find_scale(cuda::Shape shape, cuda::PackedCodebook packed) {
  found_scale = cuda::RowScale(shape, packed, 0, false);
}

// For every size of the codewords, the shortest row has scales that are normal numbers, so that its score is
// the score of the definition.
static void the_scales_of_the_shortest_rows_are_normal_numbers() {
  for (int code = -35; code <= 60; ++code) {
    const float shortest = cuda::least_norm(code);
    const int row = std::ilogb(shortest);
    double bounds[4] = {0, std::ldexp(1.0, code), 0, 0};
    float center = 0;
    cuda::PackedCodebook packed{};
    packed.bounds = bounds, packed.center = &center;
    emulation::launch(1, 32, find_scale, shape_of(1, 1, 1, 1, true), packed);
    const double up = found_scale.up, down = found_scale.down;
    CHECK(shortest >= std::ldexp(1.0, code - 60), "2^%d for codewords of 2^%d", row, code);
    CHECK(up == std::ldexp(1.0, 14 - row), "a row of 2^%d is taken up by %g", row, up);
    CHECK(down == std::ldexp(1.0, row + code - 28) && down >= 0x1p-126,
          "a product of 2^%d with 2^%d is taken down by %g", row, code, down);
  }
}

void run() {
  the_scales_of_the_shortest_rows_are_normal_numbers();
  the_number_of_blocks_changes_no_bit();
  bounds_hold();
  the_center_is_that_of_columns_with_an_offset();
  outliers_do_not_count();
  it_is_one_launch();
}
