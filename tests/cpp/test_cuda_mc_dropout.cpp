// The CUDA kernels of mc_dropout_mlp, tensor cores and all, run on the CPU thread by thread, against the kernel of the CPU. The emulation
// comes first.
#include <algorithm>
#include <cmath>
#include <memory>

#include "check.h"
#include "cpu/mc_dropout_mlp.h"
#include "cuda/emulation.h"
#include "cuda/emulation_mma.h"
#include "cuda/mc_dropout_mlp_kernels.h"

namespace cuda = uefl::cuda::mc_dropout;
namespace cpu = uefl::cpu;
using uefl::McActivation;

struct Stats {
  std::vector<float> mean, entropy, variance;

  Stats(int64_t rows, int64_t classes) : mean(rows * classes, NAN), entropy(rows, NAN), variance(rows * classes, NAN) {}
};

struct Case {
  std::vector<int64_t> widths;
  std::vector<uint32_t> thresholds;  // of 16 bits
  int64_t rows, passes;
  McActivation activation = McActivation::gelu;
  bool consistent = false;
  bool transposed = false;  // x is stored [widths[0], rows]
  int64_t first_row = 0;    // of the rows that the GPU is given, a multiple of 16

  int64_t inputs() const { return widths[0]; }
  int64_t classes() const { return widths.back(); }
  int64_t row_stride() const { return transposed ? 1 : inputs(); }
  int64_t stride() const { return transposed ? rows : 1; }
};

constexpr int64_t kSeed = 0x123456789abcdef;

static Stats on_cpu(const Case& c, const std::vector<float>& x, const std::vector<float>& parameters) {
  Stats found(c.rows, c.classes());
  const cpu::McDropout run(c.widths, parameters.data(), c.thresholds, c.activation, c.passes, c.consistent, kSeed);
  run.run({x.data(), cpu::Dtype::f32, c.rows, 1, c.inputs(), c.row_stride(), 0, c.stride()}, 0, c.rows,
          {found.mean.data(), found.entropy.data(), found.variance.data()});
  return found;
}

// What cuda/mc_dropout_mlp.cu does, for the rows from first_row on, with few blocks, so that the loops over the grid turn.
static Stats on_gpu(const Case& c, const std::vector<float>& x, const std::vector<float>& parameters) {
  const int64_t rows = c.rows - c.first_row;
  const auto problem = std::make_unique<cuda::Problem>();
  problem->depth = static_cast<int>(c.widths.size()) - 1;
  const bool small = problem->depth == 1 && c.classes() <= 32;
  const int n = small && c.classes() <= 16 ? 2 : 4;
  problem->tiles = static_cast<int>((rows + 15) / 16), problem->first_row = c.first_row;
  problem->unit_blocks = static_cast<int>((c.inputs() + 31) / 32);
  problem->classes = static_cast<int>(c.classes()), problem->padded_classes = (problem->classes + 8 * n - 1) / (8 * n) * 8 * n;
  problem->slots = static_cast<int>(std::min<int64_t>(cuda::kMostSlots, (c.passes + 1) / 2));
  problem->passes = static_cast<uint32_t>(c.passes), problem->activation = c.activation, problem->consistent = c.consistent,
  problem->seed = &kSeed;
  problem->logit_scale = uefl::dropout_scale(c.thresholds.back());
  for (size_t i = 0; i < c.thresholds.size(); ++i) problem->thresholds[i] = c.thresholds[i] << 16;

  const auto nothing = [](int64_t count) { return std::vector<float>(count, NAN); };  // NaN: what is not written must not be read
  std::vector<float4> packed_x(problem->tiles * problem->unit_blocks * cuda::kVectors);
  emulation::launch(2, 32, cuda::pack_rows<float>, x.data() + c.first_row * c.row_stride(), rows, static_cast<int>(c.inputs()),
                    c.row_stride(), c.stride(), problem->unit_blocks, static_cast<int64_t>(packed_x.size()), packed_x.data());
  problem->x = packed_x.data();
  std::vector<std::vector<float4>> packed(problem->depth);
  const float* next = parameters.data();
  int width = problem->unit_blocks;
  for (int i = 0; i < problem->depth; ++i) {
    const int inputs = static_cast<int>(c.widths[i]), outputs = static_cast<int>(c.widths[i + 1]);
    cuda::Layer& layer = problem->layers[i];
    layer = {inputs, outputs, (inputs + 31) / 32, (outputs + 8 * n - 1) / (8 * n), nullptr, next + inputs * outputs};
    packed[i].resize(layer.output_blocks * layer.unit_blocks * 4 * n * 32);
    emulation::launch(2, 32, cuda::pack_weights, next, inputs, outputs, n, uefl::dropout_scale(c.thresholds[i]), layer.unit_blocks,
                      static_cast<int64_t>(packed[i].size()), packed[i].data());
    layer.weights = packed[i].data();
    next += outputs * (inputs + 1);
    width = std::max(width, layer.output_blocks);
  }
  const int64_t slot_rows = problem->slots * problem->rows();
  auto mean = nothing(slot_rows * problem->padded_classes), moment = mean, entropy = nothing(slot_rows);
  problem->mean = mean.data(), problem->moment = moment.data(), problem->entropy = entropy.data();
  if (small) {
    const auto kernel = c.consistent ? (n == 2 ? cuda::head<2, true> : cuda::head<4, true>)
                        : n == 2     ? cuda::head<2, false>
                                     : cuda::head<4, false>;
    emulation::launch(static_cast<unsigned>(problem->tiles * problem->slots + 1), 32, kernel, *problem);
  } else {
    std::vector<float4> buffers(2 * 2 * cuda::kPasses * width * cuda::kVectors, float4{NAN, NAN, NAN, NAN});
    emulation::launch(2, 32, c.consistent ? cuda::tail<true> : cuda::tail<false>, *problem, buffers.data(), width);
  }
  Stats found(rows, c.classes());
  emulation::launch(2, 32, cuda::combine, *problem, rows, found.mean.data(), found.entropy.data(), found.variance.data());
  return found;
}

static int64_t wrong(const std::vector<float>& found, const std::vector<float>& expected, double tolerance) {
  const auto same = [&](float a, float b) { return std::fabs(a - b) <= tolerance || (std::isnan(a) && std::isnan(b)); };
  const std::vector<float> last(expected.end() - found.size(), expected.end());
  int64_t count = 0;
  for (size_t i = 0; i < found.size(); ++i) count += !same(found[i], last[i]);
  return count;
}

static Stats compare(const char* what, const Case& c, double scale = 1, double tolerance = 2e-6, float unusual = 0) {
  std::mt19937 random(static_cast<unsigned>(c.rows + c.inputs()));
  auto x = normal<float>(c.rows * c.inputs(), random);
  if (unusual != 0) x[c.rows * c.inputs() / 2] = unusual;
  std::vector<float> parameters;
  for (size_t i = 1; i < c.widths.size(); ++i) {
    for (const float w : normal<float>(c.widths[i] * c.widths[i - 1], random, 0, scale / std::sqrt(c.widths[i - 1])))
      parameters.push_back(w);
    for (const float b : normal<float>(c.widths[i], random)) parameters.push_back(b);
  }
  const Stats expected = on_cpu(c, x, parameters), found = on_gpu(c, x, parameters);
  const long counts[] = {wrong(found.mean, expected.mean, tolerance), wrong(found.entropy, expected.entropy, 2 * tolerance),
                         wrong(found.variance, expected.variance, tolerance)};
  CHECK(counts[0] + counts[1] + counts[2] == 0, "%s: %ld means, %ld entropies, %ld variances", what, counts[0], counts[1], counts[2]);
  return found;
}

constexpr uint32_t kTenth = 6554, kHalf = 32768;

static void heads() {
  compare("one of each", {{1, 1}, {kHalf, 0}, 1, 1});
  compare("ten classes", {{70, 10}, {kTenth, 0}, 20, 5});
  compare("logits dropped", {{40, 10}, {kTenth, kHalf}, 3, 4});
  compare("thirty classes", {{40, 30}, {kHalf, kTenth}, 5, 3});
  compare("one mask for all rows", {{40, 10}, {kHalf, kTenth}, 17, 3, McActivation::gelu, true});
  compare("more passes than slots take at once", {{20, 3}, {kHalf, 0}, 4, 21});
  compare("columns first", {{33, 4}, {kHalf, 0}, 6, 2, McActivation::gelu, false, true});
  compare("the second slab", {{33, 4}, {kHalf, kTenth}, 21, 3, McActivation::gelu, false, false, 16});
  compare("large logits", {{64, 10}, {kHalf, 0}, 16, 4}, 10, 1e-5);
  compare("an infinity stays in its row", {{40, 10}, {kTenth, 0}, 5, 2}, 1, 2e-6, INFINITY);
  compare("a NaN stays in its row", {{40, 10}, {kTenth, kTenth}, 5, 2}, 1, 2e-6, NAN);
}

static void tails() {
  compare("logits alone", {{5}, {kHalf}, 18, 3});
  compare("no dropout before the layer", {{20, 40}, {0, kHalf}, 3, 2});
  compare("more than 32 classes", {{40, 70}, {kTenth, kTenth}, 5, 4});
  for (const auto activation : {McActivation::gelu, McActivation::relu, McActivation::silu, McActivation::tanh}) {
    compare("two layers", {{10, 40, 5}, {kTenth, kHalf, kTenth}, 18, 3, activation});
  }
  compare("three layers", {{20, 33, 17, 40}, {kTenth, kHalf, kTenth, 0}, 5, 5, McActivation::relu, true});
  compare("a NaN stays in its row", {{40, 12, 10}, {kTenth, kTenth, kTenth}, 5, 2, McActivation::relu}, 1, 2e-6, NAN);
}

static void one_pass_has_no_variance() {
  for (const auto& widths : {std::vector<int64_t>{40, 10}, std::vector<int64_t>{20, 12, 3}}) {
    const Stats found = compare("one pass", {widths, std::vector<uint32_t>(widths.size(), kTenth), 18, 1});
    for (const float value : found.variance) CHECK(value == 0, "%g", value);
  }
}

// A row's results depend neither on how many rows follow nor on the slab that it is in.
static void rows_are_alone() {
  Case c{{40, 10}, {kHalf, kTenth}, 40, 7};
  std::mt19937 random(3);
  const auto x = normal<float>(c.rows * c.inputs(), random), parameters = normal<float>(c.inputs() * 10 + 10, random);
  const Stats whole = on_gpu(c, x, parameters);
  c.first_row = 16;
  const Stats last = on_gpu(c, x, parameters);
  CHECK(std::equal(last.mean.begin(), last.mean.end(), whole.mean.begin() + 160), "the second slab");
  c.first_row = 0, c.rows = 19;
  const Stats first = on_gpu(c, x, parameters);
  CHECK(std::equal(first.variance.begin(), first.variance.end(), whole.variance.begin()), "fewer rows");
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
  heads();
  tails();
  one_pass_has_no_variance();
  rows_are_alone();
}
