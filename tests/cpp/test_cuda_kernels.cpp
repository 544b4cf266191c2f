// Runs the CUDA kernels of vq_assign, with their tensor-core instructions, on the CPU thread by thread, and
// compares them with the definition. The emulation comes before the kernels.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_hopper.h"
#include "cuda/emulation_mma.h"
#include "cuda/far.h"
#include "cuda/packed.h"
#include "cuda/vq_assign_mma.h"
#include "cuda/vq_assign_wgmma.h"

namespace cuda = uefl::cuda;

struct SearchResult {
  std::vector<int64_t> scored, indices;  // of the streamed search; scored is -1 for rows that its first phase
                                         // leaves open
};

// The rows that the tensor cores scored and left open, over all tests. Both numbers must be positive.
static int64_t tensor_rows = 0, tensor_open = 0;

// The rows of a search without certificate that do not fit into float16.
static int64_t long_rows = 0;

// Checks a search, and counts the rows that its first phase left open.
static void check(const char* what, const TestCodebook& codebook, const cuda::Shape& shape,
                  const std::vector<int64_t>& indices, const std::vector<int64_t>& expected, bool exact) {
  const auto d = static_cast<long>(shape.d), k = static_cast<long>(shape.k);
  const auto left = static_cast<int64_t>(codebook.open().size());
  CHECK(indices == expected, "%s, d %ld, K %ld", what, d, k);
  if (exact) {
    tensor_rows += shape.outputs, tensor_open += left;
  } else {
    CHECK(left == long_rows, "%s, fast: %ld rows left", what, static_cast<long>(left));
  }
}

template <bool kCross, bool kStreamed, class T>
static std::vector<int64_t> run_mma(TestCodebook& codebook, const T* x, const cuda::Shape& shape,
                                    bool exact) {
  constexpr unsigned kBlocks = 2;
  codebook.make_lists(kBlocks * cuda::kMmaLists * cuda::mma_room(shape, kBlocks));
  std::vector<int64_t> indices(shape.outputs, -2);
  std::memset(emulation::shared, 0xff, sizeof emulation::shared);  // NaN: memory that was not written
  emulation::launch(kBlocks, cuda::kThreads, cuda::search_mma<T, kCross, kStreamed>, x, shape,
                    codebook.packed, exact, indices.data());
  return indices;
}

// Checks all shared memory of the GPU, and so little that rows and codebook pass through the shortest rings.
static int64_t wgmma_resident = 0, wgmma_streamed = 0, wgmma_even = 0, wgmma_uneven = 0;

template <int kGroups, bool kLong, class T>
static void run_wgmma(TestCodebook& codebook, const T* x, const cuda::Shape& shape,
                      const cuda::WgmmaPlan& plan, const std::vector<int64_t>& expected, bool exact) {
  codebook.make_lists(plan.items.grid * cuda::kGroupWarps * plan.room);
  std::vector<int64_t> indices(shape.outputs, -2);
  std::memset(emulation::shared, 0xff, sizeof emulation::shared);
  emulation::launch(plan.items.grid, cuda::WgmmaRoles<kGroups, kLong>::kThreads,
                    cuda::search_wgmma<T, kGroups, kLong>, x, shape, codebook.packed, plan, exact,
                    indices.data());
  check(plan.resident ? "wgmma, resident" : "wgmma, streamed", codebook, shape, indices, expected, exact);
}

template <int kGroups, class T>
static void check_wgmma(TestCodebook& codebook, const T* x, const cuda::Shape& shape,
                        const std::vector<int64_t>& expected, bool exact) {
  if (shape.outputs == 0 || !cuda::rows_in_pieces(shape, x, sizeof(T))) return;
  int64_t least = 16;
  while (least < 300 * 1024 && cuda::divide(shape, kGroups, sizeof(T), least, 2).codewords == 0) least += 16;
  for (const int64_t limit : {int64_t{227 * 1024}, least}) {
    const cuda::WgmmaPlan plan = cuda::divide(shape, kGroups, sizeof(T), limit, 2);
    CHECK(kGroups == 3 || (plan.codewords > 0 && plan.size <= limit), "no room for d %ld",
          static_cast<long>(shape.d));
    if (plan.codewords == 0 || plan.size > 227 * 1024) continue;
    ++(plan.resident ? wgmma_resident : wgmma_streamed), ++(plan.row_step != 0 ? wgmma_even : wgmma_uneven);
    if (plan.chunks > 1)
      run_wgmma<kGroups, true>(codebook, x, shape, plan, expected, exact);
    else
      run_wgmma<kGroups, false>(codebook, x, shape, plan, expected, exact);
  }
}

// Runs all searches as ops/cuda/vq_assign.cu launches them, with few blocks, so that the loops over the grid
// turn.
template <class T>
static SearchResult assign(const T* x, cuda::Shape shape, const std::vector<T>& codewords,
                           bool certify = true) {
  shape.padded_k = (shape.k + cuda::kBlockCodewords - 1) / cuda::kBlockCodewords * cuda::kBlockCodewords;
  TestCodebook codebook(codewords, shape, x);
  SearchResult answer;
  answer.scored = answer.indices = run_mma<true, true>(codebook, x, shape, certify);
  for (const int64_t output : codebook.open()) answer.scored[output] = -1;
  check("mma, streamed", codebook, shape, answer.indices, answer.indices, certify);
  const auto all = run_mma<true, false>(codebook, x, shape, certify);
  check("mma", codebook, shape, all, answer.indices, certify);
  const auto groups = run_mma<false, false>(codebook, x, shape, certify);
  check("mma, groups of four", codebook, shape, groups, answer.indices, certify);
  if constexpr (sizeof(T) <= sizeof(float)) {
    check_wgmma<2>(codebook, x, shape, answer.indices, certify);
    check_wgmma<3>(codebook, x, shape, answer.indices, certify);
  }
  return answer;
}

// Checks rows [n, segments * d] with one codebook or one per segment, and l2.
template <class T>
static SearchResult compare(const char* what, const std::vector<T>& x, int64_t segments, int64_t codebooks,
                            const std::vector<T>& codebook, int64_t d) {
  const int64_t k = static_cast<int64_t>(codebook.size()) / d / codebooks,
                outputs = static_cast<int64_t>(x.size()) / d;
  const cuda::Shape shape{outputs, segments,     codebooks, d,   k, 0, outputs / segments,
                          0,       segments * d, 1,         true};
  const SearchResult answer = assign(x.data(), shape, codebook);
  int64_t wrong = 0;
  for (int64_t i = 0; i < outputs; ++i) {
    wrong += answer.indices[i] != nearest(&x[i * d], 1, &codebook[i % segments % codebooks * k * d], k, d);
  }
  CHECK(wrong == 0, "%s: %ld of %ld", what, static_cast<long>(wrong), static_cast<long>(outputs));
  return answer;
}

static void shapes() {
  std::mt19937 random(1);
  compare("none", std::vector<float>{}, 1, 1, normal<float>(5 * 16, random), 16);
  compare("one", normal<float>(1, random), 1, 1, normal<float>(1, random), 1);
  compare("two tiles of rows and codewords", normal<float>(150 * 17, random), 1, 1,
          normal<float>(70 * 17, random), 17);
  compare("more elements than a warp", normal<float>(20 * 40, random), 1, 1, normal<float>(5 * 40, random),
          40);
  compare("three tiles on two blocks", normal<float>(300 * 2, random), 1, 1, normal<float>(9 * 2, random), 2);
  compare("segments, shared", normal<float>(50 * 12, random), 3, 1, normal<float>(20 * 4, random), 4);
  compare("segments, a codebook each", normal<float>(140 * 12, random), 3, 3,
          normal<float>(3 * 20 * 4, random), 4);
  compare("double", normal<double>(60 * 9, random), 1, 1, normal<double>(33 * 9, random), 9);
}

static void offsets_and_scales() {
  std::mt19937 random(2);
  for (const double offset : {1e3, 1e7})
    compare("offset", normal<float>(60 * 8, random, offset), 1, 1, normal<float>(33 * 8, random, offset), 8);
  for (const double scale : {1e-42, 1e-25, 1e25}) {
    compare("scale", normal<float>(30 * 8, random, 0, scale), 1, 1, normal<float>(20 * 8, random, 0, scale),
            8);
  }
  compare("rows far away", normal<float>(30 * 8, random, 1e9), 1, 1, normal<float>(20 * 8, random), 8);
}

// Without the certificate, only rows that do not fit into float16 are scored again: long rows of any
// codebook, and all rows of a long codebook.
static void fast() {
  std::mt19937 random(9);
  const int64_t n = 35, k = 20;
  std::vector<int64_t> expected(n);
  for (int64_t i = 0; i < n; ++i) expected[i] = i % k;
  for (const int64_t d : {8, 64, 200}) {
    for (const float scale : {1.0f, 0x1p40f, 0x1p62f}) {
      auto x = normal<float>(n * d, random), codebook = normal<float>(k * d, random);
      for (float& value : codebook) value *= scale;
      const bool euclidean = scale > 1;
      for (int64_t i = 0; i < n; ++i) {
        const float longer = euclidean || i % 5 > 1 ? 1 : i % 5 == 0 ? 0x1p62f : 0x1p100f;
        for (int64_t j = 0; j < d; ++j)
          x[i * d + j] = (codebook[i % k * d + j] + 0.1f * scale * x[i * d + j]) * longer;
      }
      long_rows = !euclidean ? 2 * n / 5 : scale > 0x1p60f ? n : 0;
      const SearchResult answer =
          assign(x.data(), {n, 1, 1, d, k, 0, n, 0, d, 1, euclidean}, codebook, false);
      CHECK(answer.indices == expected, "d %ld, scale %g", static_cast<long>(d), scale);
    }
  }
}

// Exact ties are scored again, and no other rows are, if the other scores are well apart.
static void flags() {
  const std::vector<float> codebook{-1, 0, 1, 0, 5, 0};
  const SearchResult answer = compare(
      "flags", std::vector<float>{-.5, 3, 0, 3, .5, 3, 3, 0, 4, 0, NAN, 0, INFINITY, 1}, 1, 1, codebook, 2);
  CHECK((answer.scored == std::vector<int64_t>{0, -1, 1, -1, 2, -1, -1}), "flags of the first phase");
  CHECK((answer.indices == std::vector<int64_t>{0, 0, 1, 1, 2, 0, 0}), "answers of the second");
}

static void duplicates_take_the_lowest_index() {
  std::mt19937 random(3);
  auto codebook = normal<float>(80 * 5, random);
  for (int64_t i = 40 * 5; i < 80 * 5; ++i) codebook[i] = codebook[i - 40 * 5];
  compare("duplicates", normal<float>(140 * 5, random), 1, 1, codebook, 5);
  auto longer = normal<float>(80 * 8, random);
  std::copy_n(longer.begin(), 40 * 8, longer.begin() + 40 * 8);
  compare("duplicates, in bulk", normal<float>(70 * 8, random), 1, 1, longer, 8);
}

// The second phase has room for eight candidates of a row. It scores rows with more candidates by the
// definition.
static void rows_of_many_candidates() {
  std::mt19937 random(10);
  const int64_t d = 20, k = 50, n = 200;
  auto codebook = normal<float>(k * d, random), x = normal<float>(n * d, random);
  const auto repeat = [&](int64_t from, int64_t times) {
    for (int64_t i = 1; i < times; ++i) std::copy_n(&codebook[from * d], d, &codebook[(from + i) * d]);
  };
  repeat(3, 8), repeat(11, 9), repeat(20, 20);
  for (int64_t i = 0; i < n * d; ++i) x[i] = 0.2f * x[i] + codebook[i / d % k * d + i % d];
  x[7 * d + 3] = NAN, x[90 * d] = INFINITY, x[199 * d + 19] = -INFINITY;
  compare("many candidates", x, 1, 1, codebook, d);
}

template <class T>
static void run_open(const T* x, cuda::Shape shape, cuda::PackedCodebook packed, const int* counts,
                     int64_t room, int64_t* indices) {
  static int open[3];
  if (threadIdx.x < 3) open[threadIdx.x] = counts[blockIdx.x * 3 + threadIdx.x];
  __syncthreads();
  cuda::search_open<false>(x, shape, packed, cuda::OpenLists(packed, open, 3, room), indices);
}

// The second phase is correct for any list: in any order, of any codebooks, with no limit, with a limit that
// excludes all codewords, and with one that includes all. Each of the two blocks has three lists: an empty
// one, a full one, and another one.
static void second_phase_of_any_list() {
  std::mt19937 random(11);
  const int64_t d = 19, k = 70, n = 250, room = 160;
  for (const int64_t codebooks : {1, 2}) {
    const auto x = normal<float>(n * codebooks * d, random),
               codewords = normal<float>(codebooks * k * d, random);
    const cuda::Shape shape{n * codebooks, codebooks, codebooks, d, k, cuda::kBlockCodewords, n, 0,
                            codebooks * d, 1,         true};
    TestCodebook codebook(codewords, shape, x.data());
    codebook.make_lists(6 * room);
    const int counts[6] = {0, 160, 30, 3, 0, 1};
    std::vector<int64_t> indices(n * codebooks, -2), expected(n * codebooks, -2);
    int64_t output = n * codebooks - 1;
    for (int list = 0; list < 6; ++list) {
      for (int i = 0; i < counts[list]; ++i, --output) {
        const float limits[] = {NAN, -INFINITY, INFINITY};
        codebook.listed[list * room + i] = {output, {__float_as_int(limits[i % 3]), 0}};
        expected[output] = nearest(&x[output * d], 1, &codewords[output % codebooks * k * d], k, d);
      }
    }
    std::memset(emulation::shared, 0xff, sizeof emulation::shared);
    emulation::launch(2, cuda::kThreads, run_open<float>, x.data(), shape, codebook.packed, counts, room,
                      indices.data());
    CHECK(indices == expected, "the second phase of any list, %ld codebooks", static_cast<long>(codebooks));
  }
}

// Codewords that are not finite change neither the indices nor the rows that are open.
static void codewords_that_are_not_finite() {
  std::mt19937 random(4);
  const int64_t d = 4, k = 20, n = 40;
  const auto x = normal<float>(n * d, random);
  for (const bool euclidean : {true, false}) {
    for (const float value : {NAN, INFINITY}) {
      auto codebook = normal<float>(k * d, random), others = codebook;
      codebook[0] = codebook[7 * d + 2] = value;
      others.erase(others.begin() + 7 * d, others.begin() + 8 * d);
      others.erase(others.begin(), others.begin() + d);
      const SearchResult answer = assign(x.data(), {n, 1, 1, d, k, 0, n, 0, d, 1, euclidean}, codebook),
                         expected = assign(x.data(), {n, 1, 1, d, k - 2, 0, n, 0, d, 1, euclidean}, others);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t index = expected.indices[i] + (expected.indices[i] < 6 ? 1 : 2);
        CHECK(answer.indices[i] == index, "row %ld", static_cast<long>(i));
        CHECK((answer.scored[i] < 0) == (expected.scored[i] < 0), "row %ld was flagged",
              static_cast<long>(i));
      }
    }
  }
}

// x is stored channels first, [2, D, 70], so rows are adjacent in memory.
static void strides() {
  std::mt19937 random(5);
  const int64_t d = 6, segments = 2, width = d * segments, inner = 70, n = 2 * inner, k = 9;
  const auto x = normal<float>(n * width, random), codebook = normal<float>(k * d, random);
  const SearchResult answer =
      assign(x.data(), {n * segments, segments, 1, d, k, 0, inner, width * inner, 1, inner, true}, codebook);
  int64_t wrong = 0;
  for (int64_t i = 0; i < n * segments; ++i) {
    const int64_t row = i / segments,
                  begin = row / inner * width * inner + row % inner + i % segments * d * inner;
    wrong += answer.indices[i] != nearest(&x[begin], inner, codebook.data(), k, d);
  }
  CHECK(wrong == 0, "%ld", static_cast<long>(wrong));
}

// Rows, or elements of a row, are more than 2^32 apart, with a codebook for each segment.
static void far_apart() {
  std::mt19937 random(12);
  const int64_t d = 8, segments = 2, width = d * segments, inner = 35, outer = 2, k = 9;
  const auto values = normal<float>(outer * inner * width, random),
             codebook = normal<float>(segments * k * d, random);
  const cuda::Shape rows{outer * inner * segments, segments,         segments, d,   k, 0, inner,
                         int64_t{5} << 30,         int64_t{1} << 27, 1,        true};
  const cuda::Shape elements{rows.outputs, segments, segments,         d,   k, 0, inner,
                             width << 28,  1,        int64_t{1} << 28, true};
  for (const cuda::Shape& shape : {rows, elements}) {
    with_far_memory([&] {
      Far<float> x(outer * shape.outer_stride + inner * shape.inner_stride);
      const auto at = [&](int64_t row) {
        return row / inner * shape.outer_stride + row % inner * shape.inner_stride;
      };
      for (int64_t i = 0; i < outer * inner * width; ++i)
        x[at(i / width) + i % width * shape.stride] = values[i];
      const SearchResult answer = assign(x.data(), shape, codebook);
      int64_t wrong = 0;
      for (int64_t i = 0; i < shape.outputs; ++i) {
        wrong += answer.indices[i] != nearest(&values[i * d], 1, &codebook[i % segments * k * d], k, d);
      }
      CHECK(wrong == 0, "%ld with a stride of %ld", static_cast<long>(wrong),
            static_cast<long>(shape.stride));
    });
  }
}

// Every row of every codebook is in one item of one block, and the items of a round share a codebook.
static void items_of(const cuda::Shape& shape, int groups) {
  const cuda::Items items(shape, groups, 132);
  const int64_t rows = shape.outputs / shape.codebooks;
  std::vector<int64_t> last_rows(shape.codebooks);
  int64_t number = 0;
  for (unsigned block = 0; block < items.grid; ++block) {
    const int here = items.number(block);
    number += here;
    for (int i = here - 3 * groups; i < here; ++i) {
      const cuda::Item item = items.at(block, i);
      CHECK(item.codebook == items.codebook(block, i / groups), "the codebook of a round");
      const int64_t after = std::min<int64_t>(item.first + cuda::kGroupRows, item.count);
      if (after > item.first) last_rows[item.codebook] = std::max(last_rows[item.codebook], after);
    }
  }
  CHECK(last_rows == std::vector<int64_t>(shape.codebooks, rows), "the last rows");
  const int64_t at_once = (shape.codebooks == 1 ? 1 : groups) * cuda::kGroupRows;
  CHECK(number * cuda::kGroupRows == (rows + at_once - 1) / at_once * at_once * shape.codebooks, "%ld items",
        static_cast<long>(number));
}

// Compares the division of Divisor with the one of C++.
static void divisors() {
  for (const int64_t by : {int64_t{1}, int64_t{3}, int64_t{49}, int64_t{1} << 20, (int64_t{1} << 33) + 5}) {
    for (const int64_t times : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1} << 18}) {
      for (int64_t value = std::max<int64_t>(0, times * by - 2); value < times * by + 3; ++value) {
        int64_t rest;
        const int64_t quotient = cuda::Divisor(by).divide(value, rest);
        CHECK(quotient == value / by && rest == value % by, "%ld / %ld", static_cast<long>(value),
              static_cast<long>(by));
      }
    }
  }
}

// Checks the parts of calls with more than 2^31 rows, elements or codewords. It runs no kernel.
static void sizes() {
  const int64_t rows = (int64_t{1} << 33) + 5, limit = 227 * 1024;
  for (const int64_t codebooks : {1, 3}) {
    const cuda::Shape shape{rows * codebooks, codebooks, codebooks, 64, 300, 384, rows, 0,
                            64 * codebooks,   1,         true};
    CHECK(shape.begin(shape.outputs - 1) == (rows - 1) * 64 * codebooks + (codebooks - 1) * 64,
          "the last of %ld", static_cast<long>(shape.outputs));
    items_of(shape, 2), items_of(shape, 3);
  }
  cuda::Shape many{1000, 1, 1, 64, 0x7fffff80, 0x7fffff80, 1000, 0, 64, 1, true};
  const cuda::WgmmaPlan plan = cuda::divide(many, 3, sizeof(float), limit, 132);
  CHECK(!plan.resident && plan.codewords >= 4 && plan.size <= limit, "%d bytes", plan.size);
  // The longest codewords, as in docs/design/search-gpu.md.
  for (const auto& [bytes, longest] : {std::pair<int64_t, int64_t>{4, 576}, {2, 640}}) {
    const auto taken = [&](int64_t d) {
      many.d = many.inner_stride = d;
      return cuda::divide(many, 2, bytes, limit, 132).codewords > 0;
    };
    CHECK(taken(longest) && !taken(longest + 8), "wgmma, %ld bytes", static_cast<long>(bytes));
  }
  for (const auto& [kilobytes, longest] : {std::pair<int64_t, int64_t>{227, 1472}, {163, 960}, {99, 448}}) {
    const int64_t room = kilobytes * 1024 - cuda::kMmaStaticBytes;
    CHECK(cuda::mma_bytes(longest) <= room && cuda::mma_bytes(longest + 1) > room, "mma, %ld KB",
          static_cast<long>(kilobytes));
  }
  many.d = many.inner_stride = int64_t{1} << 31;
  CHECK(cuda::divide(many, 2, sizeof(float), limit, 132).codewords == 0 &&
            cuda::mma_bytes(many.d) > int64_t{1} << 38,
        "long rows");
}

// With two warpgroups that prepare, each place of the ring of tiles belongs to one of them. With three
// places, a warpgroup could overwrite rows that another one has not multiplied yet.
static void places_belong_to_one_warpgroup() {
  int plans = 0;
  for (const int64_t d : {16, 48, 64, 128, 200, 256, 512}) {
    for (const int64_t codebooks : {1, 3}) {
      const cuda::Shape shape{100'000, codebooks, codebooks, d, 200, 256, 100'000, 0, codebooks * d, 1, true};
      for (int64_t limit = 60 * 1024; limit <= 227 * 1024; limit += 512) {
        const cuda::WgmmaPlan plan = cuda::divide(shape, 2, sizeof(float), limit, 132);
        if (plan.codewords == 0) continue;
        ++plans;
        CHECK(plan.tiles % 2 == 0, "%d tiles, d %ld, %ld bytes", plan.tiles, static_cast<long>(d),
              static_cast<long>(limit));
      }
    }
  }
  CHECK(plans > 1000, "%d plans", plans);
}

static void cosine() {
  std::mt19937 random(6);
  const int64_t d = 7, k = 30, n = 60;
  const auto x = normal<float>(n * d, random);
  auto codebook = normal<float>(k * d, random);
  for (int64_t j = 0; j < d; ++j)
    codebook[3 * d + j] = 0, codebook[20 * d + j] = codebook[10 * d + j] * 4;  // a zero codeword, and a tie
  const SearchResult answer = assign(x.data(), {n, 1, 1, d, k, 0, n, 0, d, 1, false}, codebook);
  for (int64_t i = 0; i < n; ++i) {
    double best = INFINITY;
    int64_t index = 0;
    for (int64_t c = 0; c < k; ++c) {
      double square = 0, total = 0;
      for (int64_t j = 0; j < d; ++j)
        square += static_cast<double>(codebook[c * d + j]) * codebook[c * d + j];
      for (int64_t j = 0; j < d && square > 0; ++j)
        total -= x[i * d + j] * (codebook[c * d + j] / std::sqrt(square));
      if (total < best) best = total, index = c;
    }
    CHECK(answer.indices[i] == index, "row %ld: %ld, expected %ld", static_cast<long>(i),
          static_cast<long>(answer.indices[i]), static_cast<long>(index));
  }
}

// Rows are not adjacent, the codebook has more blocks than the shortest ring has places, and there are more
// rows than the blocks take at once.
static void rings_turn() {
  std::mt19937 random(8);
  wgmma_resident = wgmma_streamed = wgmma_even = wgmma_uneven = 0;
  compare("blocks in depth and in codewords", normal<float>(140 * 132, random), 1, 1,
          normal<float>(260 * 132, random), 132);
  compare("a codebook each, streamed", normal<float>(150 * 2 * 68, random), 2, 2,
          normal<float>(2 * 30 * 68, random), 68);
  compare("too long for registers", normal<float>(70 * 300, random), 1, 1, normal<float>(140 * 300, random),
          300);
  compare("float16", normal<_Float16>(100 * 72, random), 1, 1, normal<_Float16>(30 * 72, random), 72);
  compare("bfloat16", normal<emulation::Bfloat16>(70 * 24, random), 1, 1,
          normal<emulation::Bfloat16>(30 * 24, random), 24);
  const auto x = normal<float>(2 * 90 * 24, random), codebook = normal<float>(130 * 16, random);
  const SearchResult answer =
      assign(x.data(), {2 * 80, 1, 1, 16, 130, 0, 80, 90 * 24, 24, 1, true}, codebook);
  int64_t wrong = 0;
  for (int64_t i = 0; i < 160; ++i)
    wrong += answer.indices[i] != nearest(&x[(i / 80 * 90 + i % 80) * 24], 1, codebook.data(), 130, 16);
  CHECK(wrong == 0, "%ld of 160 with gaps", static_cast<long>(wrong));
  CHECK(wgmma_resident > 0 && wgmma_streamed > 2 && wgmma_even > 0 && wgmma_uneven > 2,
        "%ld resident, %ld streamed, %ld even, %ld uneven", static_cast<long>(wgmma_resident),
        static_cast<long>(wgmma_streamed), static_cast<long>(wgmma_even), static_cast<long>(wgmma_uneven));
}

// A block with one round of one codebook copies only its own blocks of the codebook, although there are
// places for more. The emulation rejects a block that ends before its copies have arrived.
static void few_blocks_in_a_long_ring() {
  std::mt19937 random(14);
  const int64_t codebooks = 4, d = 128, k = 30, rows = 40;
  const auto x = normal<float>(rows * codebooks * d, random),
             codewords = normal<float>(codebooks * k * d, random);
  const cuda::Shape shape{rows * codebooks, codebooks, codebooks, d, k, cuda::kBlockCodewords, rows, 0,
                          codebooks * d,    1,         true};
  std::vector<int64_t> expected(shape.outputs);
  for (int64_t i = 0; i < shape.outputs; ++i)
    expected[i] = nearest(&x[i * d], 1, &codewords[i % codebooks * k * d], k, d);
  TestCodebook codebook(codewords, shape, x.data());
  cuda::WgmmaPlan plan;
  for (int64_t limit = 80 * 1024; plan.resident || plan.codewords < 4; limit += 1024)
    plan = cuda::divide(shape, 2, sizeof(float), limit, codebooks);
  CHECK(plan.items.rounds(0) == 1 && plan.codewords - 1 > plan.chunks, "%d plan", plan.codewords);
  run_wgmma<2, true>(codebook, x.data(), shape, plan, expected, true);
}

// On random data, the first phase must decide most rows.
static void tensor_cores_decide_most_rows() {
  std::mt19937 random(7);
  tensor_rows = tensor_open = 0;
  compare("32 elements", normal<float>(300 * 32, random), 1, 1, normal<float>(70 * 32, random), 32);
  compare("64 elements", normal<float>(60 * 64, random), 1, 1, normal<float>(70 * 64, random), 64);
  compare("100 elements, rounded up", normal<float>(60 * 100, random), 1, 1, normal<float>(70 * 100, random),
          100);
  compare("200 elements, rounded up", normal<float>(40 * 200, random), 1, 1, normal<float>(40 * 200, random),
          200);
  CHECK(0 < tensor_open && tensor_open < tensor_rows / 10, "%ld of %ld open", static_cast<long>(tensor_open),
        static_cast<long>(tensor_rows));
}

void run() {
  tensor_cores_decide_most_rows();
  rings_turn();
  few_blocks_in_a_long_ring();
  shapes();
  offsets_and_scales();
  fast();
  flags();
  duplicates_take_the_lowest_index();
  rows_of_many_candidates();
  second_phase_of_any_list();
  codewords_that_are_not_finite();
  strides();
  far_apart();
  divisors();
  sizes();
  places_belong_to_one_warpgroup();
  cosine();
}
