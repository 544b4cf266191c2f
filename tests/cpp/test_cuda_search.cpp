// Runs the searches on CUDA with hard rows: between two codewords, on a codeword that occurs twice, with a
// large common offset, at the limits of float16, not finite, or far too long. The rows have all supported
// types, lengths and layouts, and the searches have the shared memory of a GPU or little of it.
// UEFL_CUDA_ROWS is the number of rows for each path, and UEFL_CUDA_PATH the number of the only path to run.
#include <cstdlib>

#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_hopper.h"
#include "cuda/emulation_mma.h"
#include "cuda/packed.h"
#include "cuda/vq_assign_mma.h"
#include "cuda/vq_assign_wgmma.h"

namespace cuda = uefl::cuda;

enum class SearchPath { wgmma, wgmma_long, mma, mma_groups, streamed };

struct Path {
  SearchPath search;
  const char* name;
  int64_t least_d, most_d;
  bool in_bulk;  // rows at multiples of 16 bytes
  int64_t rows = 0, open = 0, wrong = 0;
};

// Returns the number of rows of each path.
static int64_t rows_wanted() {
  const char* wanted = std::getenv("UEFL_CUDA_ROWS");
  return wanted ? std::atoll(wanted) : 1000;
}

struct DrawnSearch {
  cuda::Shape shape;
  int64_t gap;  // elements between rows
};

static int64_t draw(std::mt19937& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

// Returns a shape that the path takes. Of many shapes, one is large now and then.
static DrawnSearch any_case(std::mt19937& random, const Path& path, int64_t element_bytes) {
  const int64_t piece = path.in_bulk ? 16 / element_bytes : 1, most = rows_wanted() > 50000 ? 3000 : 500;
  const int64_t longest = draw(random, 1, 8) == 1 ? path.most_d : std::min<int64_t>(path.most_d, 200);
  const int64_t d = piece * draw(random, (path.least_d + piece - 1) / piece, longest / piece);
  const int64_t segments = draw(random, 1, 3), codebooks = draw(random, 0, 2) == 0 ? segments : 1;
  const int64_t rows = draw(random, 1, 4) == 1 ? draw(random, 1, 70) : draw(random, 150, most),
                inner = draw(random, 1, rows);
  const int64_t outer = (rows + inner - 1) / inner,
                k = draw(random, 1, 3) == 1 ? draw(random, 1, 20) : draw(random, 100, 280);
  const int64_t gap = piece * std::max<int64_t>(0, draw(random, -2, 2)), width = segments * d + gap;
  const int64_t padded = (k + cuda::kBlockCodewords - 1) / cuda::kBlockCodewords * cuda::kBlockCodewords;
  return {{outer * inner * segments, segments, codebooks, d, k, padded, inner, inner * width, width, 1, true},
          gap};
}

// Makes codewords around zero, far from zero compared with their distances, or with elements at the limits of
// float16.
template <class T>
static std::vector<T> any_codewords(std::mt19937& random, int64_t count, double& scale) {
  struct Kind {
    double offset, scale;
  };
  static constexpr Kind kKinds[] = {{0, 1},      {0, 1},      {0, 1},   {4, 1},
                                    {1000, 0.1}, {-30, 1e-3}, {0, 2e4}, {0, 1e-6}};
  const Kind& kind = kKinds[draw(random, 0, 7)];
  scale = kind.scale;
  return normal<T>(count, random, kind.offset, kind.scale);
}

// Makes rows that lie between two codewords of their codebook, most of them not exactly. Some codewords occur
// twice.
template <class T>
static void fill(std::mt19937& random, const DrawnSearch& one, std::vector<T>& x, std::vector<T>& codewords) {
  const cuda::Shape& shape = one.shape;
  double scale;
  codewords = any_codewords<T>(random, shape.codebooks * shape.k * shape.d, scale);
  for (int64_t i = 0; i < shape.k / 8; ++i) {
    const int64_t from = draw(random, 0, shape.codebooks * shape.k - 1),
                  to = draw(random, 0, shape.codebooks * shape.k - 1);
    std::copy_n(&codewords[from * shape.d], shape.d, &codewords[to * shape.d]);
  }
  x.assign(shape.outputs / shape.segments / shape.inner * shape.outer_stride, T(NAN));
  std::normal_distribution<double> noise;
  const bool odd = draw(random, 0, 1) == 0;
  if (odd && draw(random, 0, 2) == 0) codewords[draw(random, 0, shape.d * shape.k - 1)] = T(NAN);
  for (int64_t output = 0; output < shape.outputs; ++output) {
    const int64_t codebook = output % shape.segments % shape.codebooks;
    const T* a = &codewords[(codebook * shape.k + draw(random, 0, shape.k - 1)) * shape.d];
    const T* b = &codewords[(codebook * shape.k + draw(random, 0, shape.k - 1)) * shape.d];
    static constexpr double kApart[] = {0, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1};
    const double apart = scale * kApart[draw(random, 0, 6)];
    T* row = &x[shape.begin(output)];
    for (int64_t j = 0; j < shape.d; ++j)
      row[j] = static_cast<T>((double{a[j]} + double{b[j]}) / 2 + apart * noise(random));
    static const double kOdd[] = {NAN, INFINITY, 6e4, 1e30, 1e-30};
    if (odd && draw(random, 0, 40) == 0)
      row[draw(random, 0, shape.d - 1)] = static_cast<T>(kOdd[draw(random, 0, 4)]);
  }
}

// Finds the nearest codewords by the definition, for many codewords at once with vectors. Each sum has the
// same order as in nearest().
template <class T>
static std::vector<int64_t> definition(const std::vector<T>& x, const cuda::Shape& shape,
                                       const std::vector<T>& codewords) {
  std::vector<double> columns(codewords.size()), totals(shape.k);  // [codebooks, d, k]
  for (int64_t i = 0; i < static_cast<int64_t>(codewords.size()); ++i) {
    const int64_t code = i / shape.d, codebook = code / shape.k;
    columns[(codebook * shape.d + i % shape.d) * shape.k + code % shape.k] =
        static_cast<double>(codewords[i]);
  }
  std::vector<int64_t> indices(shape.outputs);
  for (int64_t output = 0; output < shape.outputs; ++output) {
    const double* column = &columns[output % shape.segments % shape.codebooks * shape.d * shape.k];
    std::fill(totals.begin(), totals.end(), 0);
    for (int64_t j = 0; j < shape.d; ++j, column += shape.k) {
      const auto value = static_cast<double>(x[shape.begin(output) + j]);
      for (int64_t k = 0; k < shape.k; ++k) totals[k] += (value - column[k]) * (value - column[k]);
    }
    double best = INFINITY;
    for (int64_t k = 0; k < shape.k; ++k) {
      if (totals[k] < best) best = totals[k], indices[output] = k;
    }
  }
  return indices;
}

template <class T, int kGroups, bool kLong>
static void wgmma(TestCodebook& codebook, const std::vector<T>& x, const cuda::Shape& shape,
                  const std::vector<int64_t>& expected, Path& path, int64_t limit) {
  const cuda::WgmmaPlan plan = cuda::divide(shape, kGroups, sizeof(T), limit, 3);
  if (plan.codewords == 0) return;
  codebook.make_lists(plan.items.grid * cuda::kGroupWarps * plan.room);
  std::vector<int64_t> indices(shape.outputs, -2);
  std::memset(emulation::shared, 0xff, sizeof emulation::shared);
  emulation::launch(plan.items.grid, cuda::WgmmaRoles<kGroups, kLong>::kThreads,
                    cuda::search_wgmma<T, kGroups, kLong>, x.data(), shape, codebook.packed, plan, true,
                    indices.data());
  path.open += static_cast<int64_t>(codebook.open().size());
  for (int64_t i = 0; i < shape.outputs; ++i) path.wrong += indices[i] != expected[i];
  path.rows += shape.outputs;
}

template <class T, bool kLong>
static void any_wgmma(std::mt19937& random, TestCodebook& codebook, const std::vector<T>& x,
                      const cuda::Shape& shape, const std::vector<int64_t>& expected, Path& path) {
  // The allocator aligns a vector only to 16 bytes.
  if (!cuda::rows_in_pieces(shape, x.data(), sizeof(T))) return;
  const int64_t limit = draw(random, 0, 1) == 0 ? 227 * 1024 : 1024 * draw(random, 90, 160);
  draw(random, 0, 2) == 0 ? wgmma<T, 2, kLong>(codebook, x, shape, expected, path, limit)
                          : wgmma<T, 3, kLong>(codebook, x, shape, expected, path, limit);
}

template <class T>
static void other(TestCodebook& codebook, const std::vector<T>& x, const cuda::Shape& shape,
                  const std::vector<int64_t>& expected, Path& path) {
  constexpr unsigned kBlocks = 2;
  std::vector<int64_t> indices(shape.outputs, -2);
  codebook.make_lists(kBlocks * cuda::kMmaLists * cuda::mma_room(shape, kBlocks));
  std::memset(emulation::shared, 0xff, sizeof emulation::shared);
  const auto kernel = path.search == SearchPath::mma          ? cuda::search_mma<T, true, false>
                      : path.search == SearchPath::mma_groups ? cuda::search_mma<T, false, false>
                                                              : cuda::search_mma<T, true, true>;
  emulation::launch(kBlocks, cuda::kThreads, kernel, x.data(), shape, codebook.packed, true, indices.data());
  path.open += static_cast<int64_t>(codebook.open().size());
  for (int64_t i = 0; i < shape.outputs; ++i) path.wrong += indices[i] != expected[i];
  path.rows += shape.outputs;
}

template <class T>
static void any_search(std::mt19937& random, Path& path) {
  const DrawnSearch one = any_case(random, path, sizeof(T));
  const cuda::Shape& shape = one.shape;
  std::vector<T> x, codewords;
  fill(random, one, x, codewords);
  const std::vector<int64_t> expected = definition(x, shape, codewords);
  TestCodebook codebook(codewords, shape, x.data());
  switch (path.search) {
    case SearchPath::wgmma:
      return any_wgmma<T, false>(random, codebook, x, shape, expected, path);
    case SearchPath::wgmma_long:
      return any_wgmma<T, true>(random, codebook, x, shape, expected, path);
    default:
      other(codebook, x, shape, expected, path);
  }
}

static void many(Path path) {
  const int64_t rows = rows_wanted();
  for (unsigned seed = 1; path.rows < rows; ++seed) {
    std::mt19937 random(seed);
    const int64_t wrong = path.wrong;
    switch (seed % 3) {
      case 0:
        any_search<float>(random, path);
        break;
      case 1:
        any_search<_Float16>(random, path);
        break;
      default:
        any_search<emulation::Bfloat16>(random, path);
    }
    CHECK(path.wrong == wrong, "%s, seed %u: %ld", path.name, seed, static_cast<long>(path.wrong - wrong));
  }
  std::printf("%s: %ld rows, %ld left to the second phase, %ld wrong\n", path.name,
              static_cast<long>(path.rows), static_cast<long>(path.open), static_cast<long>(path.wrong));
  std::fflush(stdout);
}

void run() {
  const Path paths[] = {{SearchPath::wgmma, "wgmma", 1, 64, true},
                        {SearchPath::wgmma_long, "wgmma, long rows", 65, 520, true},
                        {SearchPath::mma, "mma, cross", 1, 520, false},
                        {SearchPath::mma_groups, "mma, groups of four", 1, 520, false},
                        {SearchPath::streamed, "mma, streamed", 1, 520, false}};
  const char* only = std::getenv("UEFL_CUDA_PATH");
  for (const Path& path : paths) {
    if (only == nullptr || std::atoi(only) == static_cast<int>(path.search)) many(path);
  }
}
