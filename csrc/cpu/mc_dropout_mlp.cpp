#include "cpu/mc_dropout_mlp.h"

#include <algorithm>
#include <memory>

#include "cpu/features.h"

namespace uefl::cpu {
namespace {

const McKernel& kernel() { return pick<&mc_portable, &mc_avx2, &mc_avx512>(); }

constexpr int64_t kLineFloats = 16;

// The alignment of vectors of any width.
struct alignas(64) FloatLine {
  float value[kLineFloats];
};

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

McDropout::McDropout(const std::vector<int64_t>& widths, const float* parameters,
                     const std::vector<uint32_t>& thresholds, McActivation activation, int64_t passes,
                     bool consistent, uint64_t seed) {
  const int64_t depth = static_cast<int64_t>(widths.size()) - 1, most = kernel().most_outputs;
  int64_t width = round_up(widths[0], kMcUnits);
  packed_.resize(depth);
  for (int64_t i = 0; i < depth; ++i) {
    const int64_t inputs = widths[i], outputs = widths[i + 1];
    const int64_t blocks = (outputs + most - 1) / most, block = (outputs + blocks - 1) / blocks,
                  padded = round_up(outputs, block);
    const double scale = dropout_scale(thresholds[i]);
    std::vector<float>& packed = packed_[i];
    packed.resize(padded * (inputs + 1));
    for (int64_t o = 0; o < outputs; ++o) {
      float* target = packed.data() + o / block * block * inputs + o % block;
      for (int64_t j = 0; j < inputs; ++j)
        target[j * block] = static_cast<float>(parameters[o * inputs + j] * scale);
    }
    std::copy_n(parameters + outputs * inputs, outputs, packed.data() + padded * inputs);
    parameters += outputs * (inputs + 1);
    layers_.push_back(
        {inputs, outputs, block, thresholds[i], packed.data(), packed.data() + padded * inputs});
    width = std::max(width, round_up(padded, kMcUnits));
  }
  model_ = {layers_.data(),
            depth,
            widths[0],
            width,
            thresholds[depth],
            dropout_scale(thresholds[depth]),
            activation,
            passes,
            widths.back(),
            consistent,
            seed};
}

int64_t McDropout::group_rows() const {
  return model_.consistent ? kMcGroup * kernel().lanes : kernel().lanes;
}

void McDropout::run(const StridedRows& x, int64_t lo, int64_t hi, const McStats& out) const {
  const int64_t lanes = kernel().lanes, tiles = group_rows() / lanes, inputs = x.dim,
                classes = model_.classes;
  const int64_t sizes[] = {tiles * inputs,
                           2 * kMcPasses * model_.width,
                           (model_.depth + 1) * kMcPasses * model_.width / 2,
                           tiles * classes,
                           tiles * classes,
                           tiles};
  int64_t total = 0;
  for (const int64_t size : sizes) total += size * lanes;
  const int64_t lines = (total + kLineFloats - 1) / kLineFloats;
  const std::unique_ptr<FloatLine[]> workspace(new FloatLine[lines]);
  float* parts[6];
  for (int64_t i = 0, offset = 0; i < 6; offset += sizes[i++] * lanes) parts[i] = workspace[0].value + offset;

  const float share = 1.0f / static_cast<float>(model_.passes);
  for (int64_t first = lo; first < hi; first += group_rows()) {
    const int64_t rows = std::min(hi - first, group_rows());
    std::fill(workspace.get(), workspace.get() + lines, FloatLine{});
    with_type(x.dtype, [&]<class T>(const T*) {
      for (int64_t row = 0; row < rows; ++row) {
        float* target = parts[0] + row / lanes * inputs * lanes + row % lanes;
        const T* source = reinterpret_cast<const T*>(element(x, first + row, 0));
        for (int64_t j = 0; j < inputs; ++j)
          target[j * lanes] = static_cast<float>(widen(source[j * x.dim_stride]));
      }
    });
    kernel().run(model_, {first, (rows + lanes - 1) / lanes, parts[0], parts[1],
                          reinterpret_cast<uint32_t*>(parts[2]), parts[3], parts[4], parts[5]});
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t tile = row / lanes, lane = row % lanes;
      for (int64_t c = 0; c < classes; ++c) {
        const int64_t at = (tile * classes + c) * lanes + lane;
        out.mean[(first + row) * classes + c] = parts[3][at];
        out.variance[(first + row) * classes + c] = parts[4][at] * share;
      }
      out.expected_entropy[first + row] = parts[5][tile * lanes + lane] * share;
    }
  }
}

void dropout_mask(uint64_t seed, int64_t lo, int64_t hi, int64_t columns, uint32_t pass, uint32_t stream,
                  uint32_t threshold, bool consistent, bool* keep) {
  for (int64_t row = lo; row < hi; ++row) {
    for (int64_t column = 0; column < columns; column += kMcUnits) {
      const uint32_t counter_row = consistent ? 0 : static_cast<uint32_t>(row),
                     block = static_cast<uint32_t>(column / kMcUnits);
      const PhiloxWords words = philox({{pass, counter_row, stream, block}}, seed);
      for (int64_t unit = 0; unit < std::min(kMcUnits, columns - column); ++unit) {
        keep[row * columns + column + unit] =
            (words.word[unit / 2] >> (unit % 2 * 16) & 0xffffu) >= threshold;
      }
    }
  }
}

}  // namespace uefl::cpu
