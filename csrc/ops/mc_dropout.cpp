// Registers mc_dropout_mlp and dropout_mask for the CPU, with checks of shapes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/mc_dropout_mlp.h"
#include "ops/check_mc_dropout.h"
#include "ops/dtype.h"

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> mc_dropout_mlp(const Tensor& x, const Tensor& parameters_given,
                                                  std::vector<int64_t> widths, std::vector<double> p,
                                                  int64_t passes, std::string activation, bool consistent,
                                                  const Tensor& seed) {
  check_mc_dropout(x, parameters_given, widths, p, passes, activation, seed);
  const Tensor parameters = torch::stable::contiguous(parameters_given);
  const int64_t rows = x.size(0), classes = widths.back();
  Tensor mean = torch::stable::new_empty(x, {rows, classes}, ScalarType::Float);
  Tensor entropy = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  Tensor variance = torch::stable::new_empty(x, {rows, classes}, ScalarType::Float);
  std::vector<uint32_t> thresholds;
  for (const double rate : p) thresholds.push_back(dropout_threshold(rate));

  const cpu::McDropout run(widths, static_cast<const float*>(parameters.const_data_ptr()), thresholds,
                           activation_of(activation), passes, consistent,
                           static_cast<uint64_t>(*static_cast<const int64_t*>(seed.const_data_ptr())));
  const cpu::StridedRows input{x.const_data_ptr(), dtype_of(x), rows, 1,
                               widths[0],          x.stride(0), 0,    x.stride(1)};
  const cpu::McStats out{static_cast<float*>(mean.mutable_data_ptr()),
                         static_cast<float*>(entropy.mutable_data_ptr()),
                         static_cast<float*>(variance.mutable_data_ptr())};
  const int64_t step = run.group_rows();
  torch::stable::parallel_for(0, (rows + step - 1) / step, 1, [&](int64_t lo, int64_t hi) {
    run.run(input, lo * step, std::min(rows, hi * step), out);
  });
  return {mean, entropy, variance};
}

Tensor dropout_mask(const Tensor& seed, int64_t rows, int64_t columns, int64_t pass, int64_t stream, double p,
                    bool consistent) {
  check_dropout_mask(seed, rows, columns, pass, stream, p);
  Tensor keep = torch::stable::new_empty(seed, {rows, columns}, ScalarType::Bool);
  bool* out = static_cast<bool*>(keep.mutable_data_ptr());
  const uint64_t key = static_cast<uint64_t>(*static_cast<const int64_t*>(seed.const_data_ptr()));
  torch::stable::parallel_for(0, rows, 64, [&](int64_t lo, int64_t hi) {
    cpu::dropout_mask(key, lo, hi, columns, static_cast<uint32_t>(pass), static_cast<uint32_t>(stream),
                      dropout_threshold(p), consistent, out);
  });
  return keep;
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) {
  m.impl("mc_dropout_mlp", TORCH_BOX(&uefl::mc_dropout_mlp));
  m.impl("dropout_mask", TORCH_BOX(&uefl::dropout_mask));
}
