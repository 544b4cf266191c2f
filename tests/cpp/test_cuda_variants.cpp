// Runs the variants of the search that benchmarks time on the CPU: rings, and the state of the lanes.
#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_hopper.h"
#include "cuda/emulation_mma.h"

namespace uefl::variants {
namespace {

using namespace uefl::cuda;

inline long long now() { return 0; }

}  // namespace
}  // namespace uefl::variants

#include "../../benchmarks/variants/search.cu"

namespace variants = uefl::variants;
using uefl::cuda::from_half, uefl::cuda::to_half;

constexpr int kColumns = 128, kRows = 64, kElements = 64;

// Writes values [count, d] in tiles of rows and 64 elements, with the swizzle of the products.
static std::vector<__uint128_t> tiles(const std::vector<float>& values, int64_t d, int64_t rows,
                                      float factor) {
  std::vector<__uint128_t> storage(values.size() / 8);
  auto* packed = reinterpret_cast<uint16_t*>(storage.data());
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    const int64_t row = i / d, j = i % d, chunks = d / kElements;
    const int64_t tile = row / rows * chunks + j / kElements, place = j % kElements / 8 ^ row % 8;
    packed[(tile * rows + row % rows) * kElements + place * 8 + j % 8] = to_half(factor * values[i]);
  }
  return storage;
}

// Returns the best and the second-best packed number of a lane among the scores of a row, as a kernel keeps
// them.
template <class V>
static std::vector<int> top_two(const std::vector<float>& scores, float base, int lane) {
  constexpr int kGroup = 32 / V::How::kShift;
  std::vector<int> all;
  for (int tile = 0; tile < static_cast<int>(scores.size()) / kColumns; ++tile) {
    for (int group = 0; group < 32 / kGroup; ++group) {
      int least = INT_MAX;
      for (int i = 0; i < kGroup; ++i) {
        const int n = group * kGroup + i, code = tile * kColumns + n / 2 * 8 + 2 * lane + n % 2;
        least = std::min(least, __float_as_int(scores[code] + base));
      }
      all.push_back(
          static_cast<int>(static_cast<unsigned>(least) * V::How::kShift + static_cast<unsigned>(group)));
    }
  }
  std::partial_sort(all.begin(), all.begin() + 2, all.end());
  return all;
}

// Checks K codewords of small integers, so that products are exact and no tie comes from rounding.
template <class V, class Kernel>
static void check(const char* name, Kernel kernel, int blocks, int k, int places) {
  std::mt19937 random(static_cast<unsigned>(places + k));
  const int64_t d = V::kChunks * kElements, rows = blocks * kRows;
  std::vector<float> x(rows * d), codewords(k * d), scores(k);
  for (float& value : x) value = static_cast<float>(static_cast<int>(random() % 9) - 4);
  for (float& value : codewords) value = static_cast<float>(static_cast<int>(random() % 7) - 3) / 2;
  const auto packed_rows = tiles(x, d, kRows, 1), packed_codewords = tiles(codewords, d, kColumns, -1);
  const float base = 1.5f * static_cast<float>(1 << 15);
  std::vector<__uint128_t> storage(k / kColumns * V::kStarts);
  auto* starts = reinterpret_cast<float*>(storage.data());
  std::vector<float> half(k);
  for (int code = 0; code < k; ++code) {
    for (int64_t j = 0; j < d; ++j) half[code] += codewords[code * d + j] * codewords[code * d + j] / 2;
  }
  for (int tile = 0; tile < k / kColumns; ++tile) {
    for (int lane = 0; lane < 4; ++lane) {
      for (int i = 0; i < (V::kFirst ? 64 : 32); ++i) {
        const int column = (V::kFirst ? i / 4 : i / 2) * 8 + 2 * lane + i % 2;
        starts[(tile * 4 + lane) * V::kStarts + i] = half[tile * kColumns + column] + base;
      }
    }
  }
  std::vector<variants::LaneResult> found(rows * 4, variants::LaneResult{-1, -1, -1, -1});
  const variants::SearchWork work{reinterpret_cast<const unsigned char*>(packed_rows.data()),
                                  reinterpret_cast<const unsigned char*>(packed_codewords.data()),
                                  starts,
                                  found.data(),
                                  nullptr,
                                  blocks,
                                  k / kColumns,
                                  places,
                                  V::How::kShift};
  std::memset(emulation::shared, 0xff, sizeof emulation::shared);
  emulation::launch(2, V::kThreads, kernel, work);

  int64_t wrong = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int code = 0; code < k; ++code) {
      scores[code] = half[code];
      for (int64_t j = 0; j < d; ++j) scores[code] -= x[row * d + j] * codewords[code * d + j];
    }
    for (int lane = 0; lane < 4; ++lane) {
      const std::vector<int> all = top_two<V>(scores, base, lane);
      const variants::LaneResult& kept = found[row * 4 + lane];
      wrong += kept.best != all[0] || kept.second != all[1] || kept.tile < 0 || kept.tile >= k / kColumns;
    }
  }
  CHECK(wrong == 0, "%s, K %d, %d places: %ld of %ld lanes", name, k, places, static_cast<long>(wrong),
        static_cast<long>(4 * rows));
}

#define CHECK_VARIANT(name, blocks, k, places, ...) \
  check<variants::SearchVariant<__VA_ARGS__>>(#name, variants::name, blocks, k, places)

void run() {
  using variants::Cross, variants::Groups;
  // The whole codebook is in shared memory, or in a ring. There are more blocks of rows than the warpgroups
  // take at once, and the last round is not full.
  for (const int places : {3, 4}) {
    CHECK_VARIANT(cross_3_1, 8, 512, places, Cross, 3, 1);
    CHECK_VARIANT(g4_3_1, 8, 512, places, Groups<4>, 3, 1);
  }
  CHECK_VARIANT(cross_3_1_first, 7, 256, 2, Cross, 3, 1, true);
  CHECK_VARIANT(g4_3_1_first, 7, 512, 3, Groups<4>, 3, 1, true);
  CHECK_VARIANT(g8_3_1, 7, 512, 3, Groups<8>, 3, 1);
  CHECK_VARIANT(g4_4_1, 9, 256, 2, Groups<4>, 4, 1);
  CHECK_VARIANT(cross_3_2, 7, 256, 4, Cross, 3, 2);
  CHECK_VARIANT(g4_3_2, 7, 256, 3, Groups<4>, 3, 2);
  CHECK_VARIANT(cross_3_4, 7, 256, 8, Cross, 3, 4);
  CHECK_VARIANT(g4_3_4, 7, 256, 3, Groups<4>, 3, 4);
  CHECK_VARIANT(cross_2_8, 3, 256, 3, Cross, 2, 8);
  CHECK_VARIANT(g4_2_8, 5, 256, 4, Groups<4>, 2, 8);
}
