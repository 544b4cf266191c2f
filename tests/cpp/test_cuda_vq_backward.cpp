// Runs the CUDA kernel of vq_backward on the CPU, thread by thread, and compares it with the kernel of the
// CPU. The emulation comes before the kernels.
#include <cmath>

#include "check.h"
#include "cpu/vq_backward.h"
#include "cuda/emulation.h"
#include "cuda/far.h"
#include "cuda/vq_backward_kernels.h"

namespace cuda = uefl::cuda;
namespace cpu = uefl::cpu;

template <class Wide>
static void compare(int64_t d, bool channels_first, bool rotation, bool with_g) {
  std::mt19937 random(static_cast<unsigned>(d));
  const int64_t n = 19, s = 2, k = 5, dim = s * d;
  const auto x = normal<float>(n * dim, random), g = normal<float>(n * dim, random);
  const auto codewords = normal<Wide>(s * k * d, random);
  std::vector<int64_t> indices(n * s);
  for (int64_t& index : indices) index = std::uniform_int_distribution<int64_t>(0, k - 1)(random);
  const int64_t row_stride = channels_first ? 1 : dim, stride = channels_first ? n : 1;
  std::vector<float> expected(n * dim), found(n * dim, NAN);
  const auto rows = [&](const float* data) {
    return cpu::StridedRows{data, cpu::Dtype::f32, n, 1, dim, row_stride, 0, stride};
  };
  cpu::vq_backward({.x = rows(x.data()),
                    .grad_quantized = rows(with_g ? g.data() : nullptr),
                    .grad_x = rows(expected.data()),
                    .wide = sizeof(Wide) == sizeof(double),
                    .rotation = rotation,
                    .d = d,
                    .codebook_step = k,
                    .indices = indices.data(),
                    .codewords = codewords.data(),
                    .pull = 0.25},
                   0, n);
  const cuda::View view{n, 0, row_stride, stride};
  const cuda::BackwardShape shape{n * s, s, s, k, d, view, view, view, rotation};
  const double pull = 0.25;
  emulation::launch(2, 64, cuda::backward<float, Wide>, x.data(), codewords.data(), indices.data(),
                    with_g ? g.data() : nullptr, &pull, shape, found.data());
  if constexpr (sizeof(Wide) == sizeof(float)) {
    if (d % 4 == 0 && !channels_first) {
      using Four = cuda::Four<float>;
      std::vector<float> dense(n * dim, NAN);
      const auto fours = [](const auto& values) { return reinterpret_cast<const Four*>(values.data()); };
      emulation::launch(2, 64, cuda::backward_dense<float>, fours(x), fours(codewords), indices.data(),
                        with_g ? fours(g) : nullptr, &pull, shape, reinterpret_cast<Four*>(dense.data()));
      CHECK(dense == found, "d %ld: a thread with four elements differs from a warp with a segment",
            static_cast<long>(d));
    }
  }
  for (int64_t i = 0; i < n * dim; ++i) {
    const double tolerance = rotation && with_g ? 1.3e-7 * std::fabs(expected[i]) : 0;
    CHECK(std::fabs(found[i] - expected[i]) <= tolerance, "d %ld, element %ld: %g, expected %g",
          static_cast<long>(d), static_cast<long>(i), found[i], expected[i]);
  }
}

// Rows, and then elements, are more than 2^32 apart. The bits are the same as for adjacent rows.
static void far_apart() {
  std::mt19937 random(3);
  const int64_t n = 19, d = 6, s = 2, dim = s * d, k = 5, far = int64_t{1} << 28;
  const auto values = normal<float>(n * dim, random), slopes = normal<float>(n * dim, random);
  const auto codewords = normal<double>(s * k * d, random);
  std::vector<int64_t> indices(n * s);
  for (int64_t i = 0; i < n * s; ++i) indices[i] = i % k;
  const double pull = 0.25;
  const auto gradient = [&](const cuda::View& view) {
    const int64_t size = n * view.inner_stride + dim * view.stride;
    Far<float> x(size), g(size), out(size);
    const auto place = [&](int64_t i) { return i / dim * view.inner_stride + i % dim * view.stride; };
    for (int64_t i = 0; i < n * dim; ++i) x[place(i)] = values[i], g[place(i)] = slopes[i];
    emulation::launch(2, 64, cuda::backward<float, double>, x.data(), codewords.data(), indices.data(),
                      g.data(), &pull, cuda::BackwardShape{n * s, s, s, k, d, view, view, view, true},
                      out.data());
    std::vector<float> found(n * dim);
    for (int64_t i = 0; i < n * dim; ++i) found[i] = out[place(i)];
    return found;
  };
  const auto expected = gradient({n, 0, dim, 1});
  with_far_memory([&] {
    CHECK(gradient({n, 0, far, 1}) == expected, "rows far apart");
    CHECK(gradient({n, 0, 1, far}) == expected, "elements far apart");
  });
}

// An index out of range reads nothing (the codewords are null here) and gives NaN.
static void out_of_range() {
  const float x[3] = {1, 2, 3}, g[3] = {1, 1, 1};
  const double pull = 1;
  const cuda::View view{1, 0, 3, 1};
  for (const int64_t index : {int64_t{2}, int64_t{-1}, INT64_MIN}) {
    for (const bool rotation : {false, true}) {
      float found[3] = {0, 0, 0};
      emulation::launch(1, 32, cuda::backward<float, double>, x, static_cast<const double*>(nullptr), &index,
                        g, &pull, cuda::BackwardShape{1, 1, 1, 2, 3, view, view, view, rotation}, found);
      for (const float value : found)
        CHECK(std::isnan(value), "index %ld: %g", static_cast<long>(index), value);
    }
    cuda::Four<float> four{{1, 2, 3, 4}};
    emulation::launch(1, 32, cuda::backward_dense<float>, &four,
                      static_cast<const cuda::Four<float>*>(nullptr), &index, &four, &pull,
                      cuda::BackwardShape{1, 1, 1, 2, 4, view, view, view, false}, &four);
    for (const float value : four.values)
      CHECK(std::isnan(value), "index %ld: %g", static_cast<long>(index), value);
  }
}

void run() {
  out_of_range();
  far_apart();
  for (const int64_t d : {1, 7, 40}) {
    for (const bool channels_first : {false, true}) {
      for (const bool with_g : {false, true}) {
        compare<float>(d, channels_first, false, with_g);
        compare<double>(d, channels_first, false, with_g);
        compare<double>(d, channels_first, true, with_g);
      }
    }
  }
}
