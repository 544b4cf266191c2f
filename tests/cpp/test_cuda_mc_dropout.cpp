// Runs the CUDA kernels of mc_dropout_mlp, with their tensor-core instructions, on the CPU thread by thread,
// and compares them with the kernel of the CPU. The emulation comes before the kernels.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "cpu/mc_dropout_mlp.h"
#include "cuda/emulation.h"
#include "cuda/emulation_mma.h"
#include "cuda/mc_dropout_mlp_plan.h"

namespace cuda = uefl::cuda::mc_dropout;
namespace cpu = uefl::cpu;

struct Stats {
  std::vector<float> mean, entropy, variance;

  Stats(int64_t rows, int64_t classes)
      : mean(rows * classes, NAN), entropy(rows, NAN), variance(rows * classes, NAN) {}
};

struct DropoutCase {
  std::vector<int64_t> widths;
  std::vector<uint32_t> thresholds;  // of 16 bits
  int64_t rows, passes;
  bool consistent = false;
  bool transposed = false;  // x is stored [widths[0], rows]

  int64_t inputs() const { return widths[0]; }
  int64_t classes() const { return widths.back(); }
  int64_t row_stride() const { return transposed ? 1 : inputs(); }
  int64_t stride() const { return transposed ? rows : 1; }
};

constexpr int64_t kSeed = 0x123456789abcdef;

static Stats on_cpu(const DropoutCase& c, const std::vector<float>& x, const std::vector<float>& parameters) {
  Stats found(c.rows, c.classes());
  const cpu::McDropout run(c.widths, parameters.data(), c.thresholds, uefl::McActivation::gelu, c.passes,
                           c.consistent, kSeed);
  run.run({x.data(), cpu::Dtype::f32, c.rows, 1, c.inputs(), c.row_stride(), 0, c.stride()}, 0, c.rows,
          {found.mean.data(), found.entropy.data(), found.variance.data()});
  return found;
}

// Launches few blocks of one warp for a kernel that loops, so that the loop turns, and a warp too many for
// other kernels.
struct EmulatedLauncher {
  template <class Kernel, class... Arguments>
  void over(int64_t threads, Kernel kernel, const Arguments&... arguments) const {
    emulation::launch(static_cast<unsigned>(std::min<int64_t>((threads + 31) / 32, 2)), 32, kernel,
                      arguments...);
  }
  template <class Kernel, class... Arguments>
  void all(int64_t threads, Kernel kernel, const Arguments&... arguments) const {
    emulation::launch(static_cast<unsigned>((threads + 31) / 32 + 1), 32, kernel, arguments...);
  }
};

// An array with a size from the plan. It checks that a kernel reads no memory before it is written, and
// writes nothing after the end.
template <class T>
struct GuardedArray {
  static constexpr int kBehind = 32;
  std::vector<T> all;

  explicit GuardedArray(int64_t size) : all(size + kBehind) {
    std::memset(static_cast<void*>(all.data()), 0xff, all.size() * sizeof(T));
  }  // NaN
  ~GuardedArray() {
    const auto* bytes = reinterpret_cast<const unsigned char*>(all.data() + all.size() - kBehind);
    CHECK(std::all_of(bytes, bytes + kBehind * sizeof(T), [](unsigned char byte) { return byte == 0xff; }),
          "written behind the end");
  }
  T* data() { return all.data(); }
};

// Runs the launches of ops/cuda/mc_dropout_mlp.cu for the rows from first_row on.
static Stats on_gpu(const DropoutCase& c, const std::vector<float>& x, const std::vector<float>& parameters,
                    int64_t slab_bytes = 1 << 28) {
  const cuda::McCall call{c.inputs(), c.classes(), c.thresholds[0], c.thresholds[1],
                          c.rows,     c.passes,    c.consistent};
  const cuda::Plan plan(call, slab_bytes);
  GuardedArray<uint4> weights(plan.weight_vectors), rows(plan.row_vectors);
  GuardedArray<float> moments(plan.moments);
  Stats found(c.rows, c.classes());
  const cuda::McArrays arrays{parameters.data(),    &kSeed,
                              weights.data(),       rows.data(),
                              moments.data(),       found.mean.data(),
                              found.entropy.data(), found.variance.data()};
  cuda::run(plan, arrays, x.data(), c.row_stride(), c.stride(), EmulatedLauncher{});
  return found;
}

static int64_t wrong(const std::vector<float>& found, const std::vector<float>& expected, double tolerance) {
  const auto same = [&](float a, float b) {
    return std::fabs(a - b) <= tolerance || (std::isnan(a) && std::isnan(b));
  };
  int64_t count = 0;
  for (size_t i = 0; i < found.size(); ++i) count += !same(found[i], expected[i]);
  return count;
}

static Stats compare(const char* what, const DropoutCase& c, double scale = 1, double tolerance = 2e-6,
                     float unusual = 0) {
  std::mt19937 random(static_cast<unsigned>(c.rows + c.inputs()));
  auto x = normal<float>(c.rows * c.inputs(), random);
  if (unusual != 0) x[c.rows * c.inputs() / 2] = unusual;
  std::vector<float> parameters;
  for (const float w : normal<float>(c.inputs() * c.classes(), random, 0, scale / std::sqrt(c.inputs())))
    parameters.push_back(w);
  for (const float b : normal<float>(c.classes(), random)) parameters.push_back(b);
  const Stats expected = on_cpu(c, x, parameters), found = on_gpu(c, x, parameters);
  const long counts[] = {wrong(found.mean, expected.mean, tolerance),
                         wrong(found.entropy, expected.entropy, 2 * tolerance),
                         wrong(found.variance, expected.variance, tolerance)};
  CHECK(counts[0] + counts[1] + counts[2] == 0, "%s: %ld means, %ld entropies, %ld variances", what,
        counts[0], counts[1], counts[2]);
  return found;
}

constexpr uint32_t kTenth = 6554, kHalf = 32768;

static uint32_t random_word(std::mt19937& random) { return static_cast<uint32_t>(random()); }

// Compares kept(), which compares two draws at once, with two comparisons.
static void both_halves() {
  std::mt19937 random(1);
  for (const uint32_t threshold : {0u, 1u, kTenth, 32767u, kHalf, 32769u, 60000u, 65535u}) {
    const cuda::Plan plan({8, 2, threshold, 0, 1, 1, false});
    int64_t count = 0;
    for (uint32_t half = 0; half < 65536; ++half) {
      const uint32_t other = random_word(random) >> 16;
      for (const uint32_t word : {half << 16 | other, other << 16 | half}) {
        const uint32_t expected =
            (word >> 16 >= threshold ? 0xffff0000u : 0) | ((word & 0xffff) >= threshold ? 0xffffu : 0);
        count += cuda::kept(word, plan.problem.unit_threshold) != expected;
      }
    }
    CHECK(count == 0, "threshold %u: %ld masks", threshold, static_cast<long>(count));
  }
}

// For any number of passes, every pair is in one slot, the slots become shorter and shorter, and every slot
// of every tile is in one item.
static void shares() {
  std::vector<int64_t> counts{(int64_t{1} << 31) - 1, 1000003, 4096, 1001};
  for (int64_t passes = 1; passes <= 300; ++passes) counts.push_back(passes);
  for (const int64_t passes : counts) {
    cuda::McProblem problem = cuda::Plan({8, 2, kHalf, 0, 1, passes, false}).problem;
    const auto length = [&](int slot) { return problem.begin[slot + 1] - problem.begin[slot]; };
    const auto pairs = static_cast<uint32_t>((passes + 1) / 2);
    CHECK(problem.slots <= cuda::kMostSlots && problem.begin[0] == 0 && problem.begin[problem.slots] == pairs,
          "of %ld passes", static_cast<long>(passes));
    double rest = 1;  // the weight of a slot in a mean is its share, times what later slots leave
    for (int slot = 0; slot < problem.slots; ++slot) {
      CHECK(length(slot) > 0 && length(slot) <= length(0), "slot %d of %ld passes", slot,
            static_cast<long>(passes));
    }
    for (int slot = problem.slots - 1; slot >= 0; --slot) {
      const int64_t all = std::min(2 * int64_t{problem.begin[slot + 1]}, passes),
                    own = all - 2 * int64_t{problem.begin[slot]};
      const double weight = problem.share[slot] * rest * static_cast<double>(passes);
      rest *= 1 - static_cast<double>(problem.share[slot]);
      CHECK(std::abs(weight - static_cast<double>(own)) <= 1e-5 * static_cast<double>(own),
            "slot %d of %ld passes has %ld, weighs %g", slot, static_cast<long>(passes),
            static_cast<long>(own), weight);
    }
    CHECK(rest == 0, "%ld passes leave %g", static_cast<long>(passes), rest);
    CHECK(length(problem.slots - 1) == 1 || passes > 100, "the last of %ld passes is long",
          static_cast<long>(passes));
    problem.tiles = 3;
    std::vector<int> found(problem.tiles * problem.slots);
    for (int64_t i = 0; i < problem.items(); ++i) {
      const cuda::TileSlot item(problem, i);
      CHECK(item.tile >= 0 && item.tile < problem.tiles, "item %ld", static_cast<long>(i));
      if (item.slot < problem.slots) ++found[item.tile * problem.slots + item.slot];
    }
    CHECK(std::count(found.begin(), found.end(), 1) == static_cast<long>(found.size()), "items of %ld passes",
          static_cast<long>(passes));
    problem.tiles = 1 << 30;
    const cuda::TileSlot far(problem, (int64_t{1} << 30) * problem.side - 1);
    CHECK(far.tile == (1 << 30) - 1 && far.slot == problem.side - 1, "an item beyond 32 bits");
  }
}

static void heads() {
  compare("one of each", {{1, 1}, {kHalf, 0}, 1, 1});
  compare("ten classes", {{70, 10}, {kTenth, 0}, 20, 5});
  compare("logits dropped", {{40, 10}, {kTenth, kHalf}, 3, 4});
  compare("thirty classes", {{40, 30}, {kHalf, kTenth}, 5, 3});
  compare("one mask for all rows", {{40, 10}, {kHalf, kTenth}, 17, 3, true});
  compare("slots of several pairs", {{20, 3}, {kHalf, 0}, 4, 51});
  compare("columns first", {{33, 4}, {kHalf, 0}, 6, 2, false, true});
  compare("large logits", {{64, 10}, {kHalf, 0}, 16, 4}, 10, 1e-5);
  compare("no dropout before the layer", {{20, 32}, {0, kHalf}, 3, 2});
  compare("odd sizes", {{33, 17}, {kTenth, kTenth}, 33, 5});
  compare("one unit, one class", {{1, 1}, {0, kHalf}, 17, 3});
  compare("tiny weights", {{40, 10}, {kHalf, 0}, 5, 3}, 1e-30);
  compare("a unit that is far larger than others", {{70, 10}, {kHalf, 0}, 5, 4}, 1e-4, 2e-6, 3e4f);
  compare("a unit that overflows", {{40, 10}, {0, 0}, 5, 1}, 1, 2e-6, 3e38f);
  for (const uint32_t threshold : {0u, 1u, 65535u}) compare("rare draws", {{40, 10}, {threshold, 0}, 5, 9});
  compare("an infinity stays in its row", {{40, 10}, {kTenth, 0}, 5, 2}, 1, 2e-6, INFINITY);
  compare("a NaN stays in its row", {{40, 10}, {kTenth, kTenth}, 5, 2}, 1, 2e-6, NAN);
}

static void one_pass_has_no_variance() {
  for (const int64_t classes : {10, 30}) {
    const Stats found = compare("one pass", {{40, classes}, {kTenth, kTenth}, 18, 1});
    for (const float value : found.variance) CHECK(value == 0, "%g", value);
  }
}

// The results of a row do not depend on the number of rows, or on the number of rows in a slab.
static void rows_are_alone() {
  std::mt19937 random(3);
  for (const int64_t classes : {10, 30}) {
    DropoutCase c{{40, classes}, {kTenth, kTenth}, 40, 7};
    const auto x = normal<float>(c.rows * c.inputs(), random),
               parameters = normal<float>(classes * (c.inputs() + 1), random);
    const Stats whole = on_gpu(c, x, parameters), slabs = on_gpu(c, x, parameters, 1);
    CHECK(slabs.mean == whole.mean && slabs.entropy == whole.entropy && slabs.variance == whole.variance,
          "three slabs");
    c.rows = 19;
    const Stats first = on_gpu(c, x, parameters);
    CHECK(std::equal(first.variance.begin(), first.variance.end(), whole.variance.begin()), "fewer rows");
  }
}

// Checks sizes beyond 32 bits. It runs no kernel.
static void sizes() {
  const auto plan = [](int64_t inputs, int64_t classes, int64_t rows, int64_t passes) {
    return cuda::Plan({inputs, classes, kHalf, kHalf, rows, passes, false});
  };
  const cuda::Plan many = plan(64, 10, (int64_t{1} << 32) - 1, 20);
  CHECK(many.slab % 16 == 0 && many.slab * 4 * (66 + 10 * 33) <= 1 << 28 && many.slab > 100000, "%ld rows",
        static_cast<long>(many.slab));
  CHECK(many.row_vectors * 4 == many.slab * 66 && many.moments == many.slab * 10 * 33, "of many rows");
  CHECK(many.weight_vectors == 2 * (2 * 2 * 32 + 1), "of a head");
  const cuda::Plan wide = plan(1 << 30, 32, 5, 2);
  CHECK(wide.slab == 16 && wide.moments == 16 * 65, "of many inputs");
  CHECK(wide.weight_vectors == (int64_t{1} << 25) * (2 * 4 * 32 + 1), "of many inputs");
  CHECK(wide.row_vectors == (int64_t{1} << 25) * (128 + 4), "of many inputs");
  for (const int64_t passes :
       {int64_t{1}, int64_t{100}, (int64_t{1} << 31) - 1}) {  // blocks of a grid; head needs all of them
    cuda::Plan most = plan(1, 1, int64_t{1} << 40, passes);
    most.problem.tiles = static_cast<int>(most.slab / 16);
    CHECK(most.problem.items() <= int64_t{cuda::kSide} << 20, "%ld items",
          static_cast<long>(most.problem.items()));
  }
}

static void masks() {
  for (const bool consistent : {false, true}) {
    const int64_t rows = 7, columns = 13;
    bool expected[rows * columns], found[rows * columns];
    cpu::dropout_mask(kSeed, 0, rows, columns, 3, 2, kHalf, consistent, expected);
    emulation::launch(1, 32, cuda::dropout_mask, &kSeed, rows, columns, 3u, 2u, kHalf, consistent, +found);
    CHECK(std::equal(found, found + rows * columns, expected), "masks");
  }
}

void run() {
  masks();
  both_halves();
  shares();
  heads();
  one_pass_has_no_variance();
  rows_are_alone();
  sizes();
}
