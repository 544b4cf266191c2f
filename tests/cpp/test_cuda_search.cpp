// The search with wgmma on rows made to be hard: between two codewords, on a codeword that is there twice,
// not finite, far too long; of all supported types, lengths and layouts, with the shared memory of a GPU and
// with little. UEFL_CUDA_ROWS is the number of rows for each path (tools: a million takes an hour).
#include <cstdlib>

#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_hopper.h"
#include "cuda/emulation_mma.h"
#include "cuda/packed.h"
#include "cuda/vq_assign_mma.h"
#include "cuda/vq_assign_wgmma.h"

namespace cuda = uefl::cuda;

struct Path {
  const char* name;
  bool is_long, cross;
  int64_t rows = 0, open = 0, wrong = 0;
};

struct Case {
  cuda::Shape shape;
  int64_t gap;  // elements between rows
};

static int64_t draw(std::mt19937& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

// A shape with rows that wgmma takes, 16 bytes at a time.
static Case any_case(std::mt19937& random, const Path& path, int64_t element_bytes) {
  const int64_t piece = 16 / element_bytes;
  const int64_t d =
      piece * draw(random, path.is_long ? 64 / piece + 1 : 1, (path.is_long ? 200 : 64) / piece);
  const int64_t segments = draw(random, 1, 3), books = draw(random, 0, 2) == 0 ? segments : 1;
  const int64_t rows = draw(random, 1, 4) == 1 ? draw(random, 1, 70) : draw(random, 150, 500),
                inner = draw(random, 1, rows);
  const int64_t outer = (rows + inner - 1) / inner,
                k = draw(random, 1, 3) == 1 ? draw(random, 1, 20) : draw(random, 100, 280);
  const int64_t gap = piece * std::max<int64_t>(0, draw(random, -2, 2)), width = segments * d + gap;
  const int64_t padded = (k + cuda::kBlockCodes - 1) / cuda::kBlockCodes * cuda::kBlockCodes;
  return {{outer * inner * segments, segments, books, d, k, padded, inner, inner * width, width, 1, true},
          gap};
}

// Rows that lie between two codewords of their book, most of them not quite; some codewords are there twice.
template <class T>
static void fill(std::mt19937& random, const Case& one, std::vector<T>& x, std::vector<T>& codewords) {
  const cuda::Shape& shape = one.shape;
  codewords = normal<T>(shape.books * shape.k * shape.d, random, draw(random, 0, 3) == 0 ? 4 : 0);
  for (int64_t i = 0; i < shape.k / 8; ++i) {
    const int64_t from = draw(random, 0, shape.books * shape.k - 1),
                  to = draw(random, 0, shape.books * shape.k - 1);
    std::copy_n(&codewords[from * shape.d], shape.d, &codewords[to * shape.d]);
  }
  x.assign(shape.outputs / shape.segments / shape.inner * shape.outer_stride, T(NAN));
  std::normal_distribution<double> noise;
  const bool odd = draw(random, 0, 1) == 0;
  for (int64_t output = 0; output < shape.outputs; ++output) {
    const int64_t book = output % shape.segments % shape.books;
    const T* a = &codewords[(book * shape.k + draw(random, 0, shape.k - 1)) * shape.d];
    const T* b = &codewords[(book * shape.k + draw(random, 0, shape.k - 1)) * shape.d];
    static constexpr double kApart[] = {0, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1};
    const double apart = kApart[draw(random, 0, 6)];
    T* row = &x[shape.begin(output)];
    for (int64_t j = 0; j < shape.d; ++j)
      row[j] = static_cast<T>((double{a[j]} + double{b[j]}) / 2 + apart * noise(random));
    static const double kOdd[] = {NAN, INFINITY, 6e4, 1e30, 1e-30};
    if (odd && draw(random, 0, 40) == 0)
      row[draw(random, 0, shape.d - 1)] = static_cast<T>(kOdd[draw(random, 0, 4)]);
  }
}

// The results of vq: NaN, or a number that is none, where a kernel must write.
template <class T>
struct Made {
  std::vector<T> quantized;
  std::vector<long long> counts;
  double error = 0;
  float rounded = NAN;
  std::vector<double> parts;
  long long done = 0;

  Made(const cuda::Shape& shape, unsigned blocks)
      : quantized(shape.outputs * shape.d, T(NAN)),
        counts(shape.books * shape.k),
        parts(blocks * cuda::kGroupWarps, NAN) {}

  cuda::Quantized wanted(const std::vector<float>& codes) {
    return {quantized.data(), codes.data(), counts.data(), {&error, &rounded, kFactor, parts.data(), &done}};
  }
  static constexpr double kFactor = 0.25;
};

// The same by its definition, compared.
template <class T>
static void check(const char* name, const std::vector<T>& x, const cuda::Shape& shape,
                  const std::vector<float>& codes, const std::vector<int64_t>& indices, const Made<T>& made) {
  std::vector<long long> counts(made.counts.size());
  double error = 0;
  int64_t wrong = 0;
  for (int64_t output = 0; output < shape.outputs; ++output) {
    const int64_t code = output % shape.segments % shape.books * shape.k + indices[output];
    ++counts[code];
    for (int64_t j = 0; j < shape.d; ++j) {
      const double target = codes[code * shape.d + j],
                   apart = static_cast<double>(x[shape.begin(output) + j]) - target;
      wrong += static_cast<double>(made.quantized[output * shape.d + j]) != target;
      error += apart * apart * Made<T>::kFactor;
    }
  }
  CHECK(wrong == 0 && made.counts == counts, "%s: %ld elements, or counts", name, static_cast<long>(wrong));
  const bool close = std::isnan(error) ? std::isnan(made.error)
                                       : made.error == error || std::fabs(made.error - error) <= 1e-6 * error;
  CHECK(close, "%s: error %g, expected %g", name, made.error, error);
  const auto rounded = static_cast<float>(made.error);
  CHECK(std::memcmp(&made.rounded, &rounded, sizeof rounded) == 0, "%s: %g", name, double{made.rounded});
}

template <class T, int kGroups, bool kLong, bool kCross>
static void search(Codebook& codebook, const std::vector<T>& x, const std::vector<float>& codes,
                   const cuda::Shape& shape, const std::vector<int64_t>& expected, Path& path,
                   int64_t limit) {
  const cuda::Stages stages = cuda::divide(shape, kGroups, sizeof(T), limit, 3);
  if (stages.codes == 0) return;
  double error = 0;
  const int runs = path.rows / 100 % 4 == 0 ? 3 : 1;  // indices, and now and then twice what vq makes of them
  for (int run = 0; run < runs; ++run) {
    codebook.make_lists(stages.items.grid * cuda::kGroupWarps * stages.room);
    std::vector<int64_t> indices(shape.outputs, -2);
    Made<T> made(shape, stages.items.grid);
    std::memset(emulation::shared, 0xff, sizeof emulation::shared);
    emulation::launch(stages.items.grid, cuda::Layout<kGroups>::kThreads,
                      cuda::search_wgmma<T, kGroups, kLong, kCross>, x.data(), shape, codebook.packed, stages,
                      true, indices.data(), run == 0 ? cuda::Quantized{} : made.wanted(codes));
    if (run == 0) path.open += static_cast<int64_t>(codebook.open().size());
    for (int64_t i = 0; i < shape.outputs; ++i) path.wrong += indices[i] != expected[i];
    if (run == 1) check(path.name, x, shape, codes, expected, made), error = made.error;
    CHECK(run < 2 || std::memcmp(&error, &made.error, sizeof error) == 0, "%s: another error", path.name);
  }
  path.rows += shape.outputs;
}

template <class T, bool kLong, bool kCross>
static void any_search(std::mt19937& random, Path& path) {
  const Case one = any_case(random, path, sizeof(T));
  const cuda::Shape& shape = one.shape;
  std::vector<T> x, codewords;
  fill(random, one, x, codewords);
  // 16 bytes at a time: a vector of the type is no more aligned than the allocator likes, which is to 16.
  if (!cuda::rows_in_bulk(shape, x.data(), sizeof(T))) return;
  std::vector<int64_t> expected(shape.outputs);
  for (int64_t i = 0; i < shape.outputs; ++i) {
    expected[i] = nearest(&x[shape.begin(i)], 1,
                          &codewords[i % shape.segments % shape.books * shape.k * shape.d], shape.k, shape.d);
  }
  Codebook codebook(codewords, shape, x.data());
  const int64_t limit = draw(random, 0, 1) == 0 ? 227 * 1024 : 1024 * draw(random, 90, 160);
  std::vector<float> codes(codewords.size());
  std::transform(codewords.begin(), codewords.end(), codes.begin(),
                 [](T value) { return static_cast<float>(value); });
  draw(random, 0, 2) == 0 ? search<T, 2, kLong, kCross>(codebook, x, codes, shape, expected, path, limit)
                          : search<T, 3, kLong, kCross>(codebook, x, codes, shape, expected, path, limit);
}

template <bool kLong, bool kCross>
static void many(Path path) {
  const char* wanted = std::getenv("UEFL_CUDA_ROWS");
  const int64_t rows = wanted ? std::atoll(wanted) : 1000;
  for (unsigned seed = 1; path.rows < rows; ++seed) {
    std::mt19937 random(seed);
    const int64_t wrong = path.wrong;
    switch (seed % 3) {
      case 0:
        any_search<float, kLong, kCross>(random, path);
        break;
      case 1:
        any_search<_Float16, kLong, kCross>(random, path);
        break;
      default:
        any_search<emulation::Bfloat16, kLong, kCross>(random, path);
    }
    CHECK(path.wrong == wrong, "%s, seed %u: %ld", path.name, seed, static_cast<long>(path.wrong - wrong));
  }
  std::printf("%s: %ld rows, %ld left to the second pass, %ld wrong\n", path.name,
              static_cast<long>(path.rows), static_cast<long>(path.open), static_cast<long>(path.wrong));
}

void run() {
  many<false, true>({"short rows, cross", false, true});
  many<false, false>({"short rows, groups of four", false, false});
  many<true, true>({"long rows", true, true});
}
