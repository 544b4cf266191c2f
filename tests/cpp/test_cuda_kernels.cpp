// The CUDA kernels of vq_assign, tensor cores and all, run on the CPU thread by thread, against the definition. The emulation comes before
// the kernels.
#include "check.h"
#include "cuda/emulation.h"
#include "cuda/emulation_mma.h"
#include "cuda/vq_assign_tensor.h"

namespace cuda = uefl::cuda;

struct Answer {
  std::vector<int64_t> scored, indices;  // before and after the second pass
};

// Rows that the tensor cores scored and left open, over all the tests: both must be some.
static int64_t tensor_rows = 0, tensor_open = 0;

template <class T, int kSteps>
static void check_tensor(const T* x, const cuda::Shape& shape, const cuda::Packed& packed, const std::vector<int64_t>& expected) {
  constexpr int kWidth = cuda::Tiling<kSteps>::kWidth;
  const int64_t codes = shape.books * shape.padded_k, count = shape.outputs / shape.books;
  std::vector<__uint128_t> halves((codes * kWidth + 7) / 8);  // aligned to 16 bytes
  std::vector<float> half_norms(codes, NAN);
  std::vector<double> rest(shape.books);
  std::vector<long long> counts(shape.books);
  std::vector<int64_t> listed(shape.outputs, -1), indices(shape.outputs, -2);
  const cuda::PackedHalves arrays{reinterpret_cast<uint16_t*>(halves.data()), half_norms.data(), rest.data(), counts.data(), listed.data()};
  emulation::launch(static_cast<unsigned>((codes * 32 + 63) / 64), 64, cuda::pack_halves, shape, packed, arrays, kWidth);
  emulation::launch(2, cuda::kThreads, cuda::search_tensor<T, kSteps>, x, shape, packed, arrays, true, indices.data(), cuda::Tail{});
  std::vector<bool> open(shape.outputs);
  for (int64_t book = 0; book < shape.books; ++book) {
    for (int64_t i = 0; i < counts[book]; ++i) open[listed[book * count + i]] = true;
    tensor_open += counts[book];
  }
  tensor_rows += shape.outputs;
  int64_t wrong = 0;
  for (int64_t i = 0; i < shape.outputs; ++i) wrong += !open[i] && indices[i] != expected[i];
  CHECK(wrong == 0, "tensor cores, %d steps: %ld rows are wrong and not on the list", kSteps, static_cast<long>(wrong));
  emulation::launch(1, cuda::kThreads, cuda::search<T>, x, shape, packed, true, indices.data(),
                    cuda::Selection{listed.data(), counts.data()}, cuda::Tail{});
  emulation::launch(1, 64, cuda::rescore<T>, x, shape, packed, indices.data());
  CHECK(indices == expected, "tensor cores, %d steps: the passes after the first", kSteps);
}

// What cuda/vq_assign.cu does, with few blocks, so that the loops over the grid turn.
template <class T>
static Answer assign(const T* x, cuda::Shape shape, const std::vector<T>& codebook) {
  shape.padded_k = (shape.k + cuda::kCodes - 1) / cuda::kCodes * cuda::kCodes;
  const int64_t size = shape.books * shape.d * shape.padded_k;
  std::vector<double> exact(size, NAN), bounds(2 * shape.books, NAN);  // NaN: what is not written must not be read
  std::vector<float> codes(size, NAN), half_norms(shape.books * shape.padded_k, NAN), mean(shape.books * shape.d, NAN);
  alignas(16) const cuda::Packed packed{exact.data(), bounds.data(), codes.data(), half_norms.data(), mean.data()};
  const auto blocks = [](int64_t threads) { return static_cast<unsigned>((threads + 63) / 64); };
  emulation::launch(blocks(32 * shape.books * shape.k), 64, cuda::pack_exact<T>, codebook.data(), shape, packed);
  emulation::launch(blocks(32 * shape.books * shape.d), 64, cuda::pack_centred, shape, packed);
  emulation::launch(blocks(shape.books * shape.padded_k), 64, cuda::pack_norms, shape, packed);
  Answer answer{std::vector<int64_t>(shape.outputs, -2), {}};
  emulation::launch(2, cuda::kThreads, cuda::search<T>, x, shape, packed, true, answer.scored.data(), cuda::Selection{}, cuda::Tail{});
  answer.indices = answer.scored;
  emulation::launch(1, 64, cuda::rescore<T>, x, shape, packed, answer.indices.data());

  // The same with the tensor cores first: they leave a list, and what they do not list must be right already.
  switch (shape.d <= 16 ? 1 : shape.d <= 32 ? 2 : shape.d <= 64 ? 4 : shape.d <= 128 ? 8 : 16) {
    case 1:
      check_tensor<T, 1>(x, shape, packed, answer.indices);
      break;
    case 2:
      check_tensor<T, 2>(x, shape, packed, answer.indices);
      break;
    case 4:
      check_tensor<T, 4>(x, shape, packed, answer.indices);
      break;
    case 8:
      check_tensor<T, 8>(x, shape, packed, answer.indices);
      break;
    default:
      check_tensor<T, 16>(x, shape, packed, answer.indices);
  }
  return answer;
}

// Rows [n, segments * d], one codebook or one per segment, l2.
template <class T>
static Answer compare(const char* what, const std::vector<T>& x, int64_t segments, int64_t books, const std::vector<T>& codebook,
                      int64_t d) {
  const int64_t k = static_cast<int64_t>(codebook.size()) / d / books, outputs = static_cast<int64_t>(x.size()) / d;
  const cuda::Shape shape{outputs, segments, books, d, k, 0, outputs / segments, 0, segments * d, 1, true};
  const Answer answer = assign(x.data(), shape, codebook);
  int64_t wrong = 0;
  for (int64_t i = 0; i < outputs; ++i) {
    wrong += answer.indices[i] != nearest(&x[i * d], 1, &codebook[i % segments % books * k * d], k, d);
  }
  CHECK(wrong == 0, "%s: %ld of %ld", what, static_cast<long>(wrong), static_cast<long>(outputs));
  return answer;
}

static void shapes() {
  std::mt19937 random(1);
  compare("one", normal<float>(1, random), 1, 1, normal<float>(1, random), 1);
  compare("two tiles of rows and codewords", normal<float>(150 * 17, random), 1, 1, normal<float>(70 * 17, random), 17);
  compare("more elements than a warp", normal<float>(20 * 40, random), 1, 1, normal<float>(5 * 40, random), 40);
  compare("three tiles on two blocks", normal<float>(300 * 2, random), 1, 1, normal<float>(9 * 2, random), 2);
  compare("segments, shared", normal<float>(50 * 12, random), 3, 1, normal<float>(20 * 4, random), 4);
  compare("segments, a codebook each", normal<float>(140 * 12, random), 3, 3, normal<float>(3 * 20 * 4, random), 4);
  compare("double", normal<double>(60 * 9, random), 1, 1, normal<double>(33 * 9, random), 9);
}

static void offsets_and_scales() {
  std::mt19937 random(2);
  for (const double offset : {1e3, 1e7})
    compare("offset", normal<float>(60 * 8, random, offset), 1, 1, normal<float>(33 * 8, random, offset), 8);
  for (const double scale : {1e-42, 1e-25, 1e25}) {
    compare("scale", normal<float>(30 * 8, random, 0, scale), 1, 1, normal<float>(20 * 8, random, 0, scale), 8);
  }
  compare("rows far away", normal<float>(30 * 8, random, 1e9), 1, 1, normal<float>(20 * 8, random), 8);
}

// Exact ties are re-scored and nothing else is, where the rest is well apart.
static void flags() {
  const std::vector<float> codebook{-1, 0, 1, 0, 5, 0};
  const Answer answer = compare("flags", std::vector<float>{-.5, 3, 0, 3, .5, 3, 3, 0, 4, 0, NAN, 0, INFINITY, 1}, 1, 1, codebook, 2);
  CHECK((answer.scored == std::vector<int64_t>{0, -1, 1, -1, 2, -1, -1}), "flags of the first pass");
  CHECK((answer.indices == std::vector<int64_t>{0, 0, 1, 1, 2, 0, 0}), "answers of the second");
}

static void duplicates_take_the_lowest_index() {
  std::mt19937 random(3);
  auto codebook = normal<float>(80 * 5, random);
  for (int64_t i = 40 * 5; i < 80 * 5; ++i) codebook[i] = codebook[i - 40 * 5];
  compare("duplicates", normal<float>(140 * 5, random), 1, 1, codebook, 5);
}

static void codewords_that_are_not_finite() {
  std::mt19937 random(4);
  const int64_t d = 4, k = 20, n = 40;
  const auto x = normal<float>(n * d, random);
  for (const bool euclidean : {true, false}) {
    for (const float value : {NAN, INFINITY}) {
      auto codebook = normal<float>(k * d, random);
      codebook[0] = codebook[7 * d + 2] = value;
      const Answer answer = assign(x.data(), {n, 1, 1, d, k, 0, n, 0, d, 1, euclidean}, codebook);
      for (int64_t i = 0; i < n; ++i) {
        CHECK(answer.indices[i] > 0 && answer.indices[i] != 7 && answer.indices[i] < k, "row %ld", static_cast<long>(i));
        CHECK(answer.scored[i] == answer.indices[i], "row %ld was flagged", static_cast<long>(i));
      }
    }
  }
}

// x stored channels first, [2, D, 70]: rows lie side by side.
static void strides() {
  std::mt19937 random(5);
  const int64_t d = 6, segments = 2, width = d * segments, inner = 70, n = 2 * inner, k = 9;
  const auto x = normal<float>(n * width, random), codebook = normal<float>(k * d, random);
  const Answer answer = assign(x.data(), {n * segments, segments, 1, d, k, 0, inner, width * inner, 1, inner, true}, codebook);
  int64_t wrong = 0;
  for (int64_t i = 0; i < n * segments; ++i) {
    const int64_t row = i / segments, begin = row / inner * width * inner + row % inner + i % segments * d * inner;
    wrong += answer.indices[i] != nearest(&x[begin], inner, codebook.data(), k, d);
  }
  CHECK(wrong == 0, "%ld", static_cast<long>(wrong));
}

static void cosine() {
  std::mt19937 random(6);
  const int64_t d = 7, k = 30, n = 60;
  const auto x = normal<float>(n * d, random);
  auto codebook = normal<float>(k * d, random);
  for (int64_t j = 0; j < d; ++j) codebook[3 * d + j] = 0, codebook[20 * d + j] = codebook[10 * d + j] * 4;  // zero, and a tie
  const Answer answer = assign(x.data(), {n, 1, 1, d, k, 0, n, 0, d, 1, false}, codebook);
  for (int64_t i = 0; i < n; ++i) {
    double best = INFINITY;
    int64_t index = 0;
    for (int64_t c = 0; c < k; ++c) {
      double square = 0, total = 0;
      for (int64_t j = 0; j < d; ++j) square += static_cast<double>(codebook[c * d + j]) * codebook[c * d + j];
      for (int64_t j = 0; j < d && square > 0; ++j) total -= x[i * d + j] * (codebook[c * d + j] / std::sqrt(square));
      if (total < best) best = total, index = c;
    }
    CHECK(answer.indices[i] == index, "row %ld: %ld, expected %ld", static_cast<long>(i), static_cast<long>(answer.indices[i]),
          static_cast<long>(index));
  }
}

// Data of no malice: the first pass must settle most of it.
static void tensor_cores_settle_most_rows() {
  std::mt19937 random(7);
  tensor_rows = tensor_open = 0;
  compare("32 elements", normal<float>(300 * 32, random), 1, 1, normal<float>(70 * 32, random), 32);
  compare("64 elements", normal<float>(60 * 64, random), 1, 1, normal<float>(70 * 64, random), 64);
  compare("100 elements, rounded up", normal<float>(60 * 100, random), 1, 1, normal<float>(70 * 100, random), 100);
  compare("200 elements, rounded up", normal<float>(40 * 200, random), 1, 1, normal<float>(40 * 200, random), 200);
  CHECK(0 < tensor_open && tensor_open < tensor_rows / 10, "%ld of %ld open", static_cast<long>(tensor_open),
        static_cast<long>(tensor_rows));
}

void run() {
  tensor_cores_settle_most_rows();
  shapes();
  offsets_and_scales();
  flags();
  duplicates_take_the_lowest_index();
  codewords_that_are_not_finite();
  strides();
  cosine();
}
