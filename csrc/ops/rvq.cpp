// Registers rvq for the CPU, with checks of shapes.
#include "cpu/rvq.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ops/search_input.h"

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::vector<SearchInput> inputs_of(const Tensor& x, const std::vector<Tensor>& codebooks,
                                   const std::string& metric) {
  if (codebooks.empty()) throw std::runtime_error("rvq: codebooks must hold at least one codebook");
  std::vector<SearchInput> inputs;
  for (const Tensor& codebook : codebooks) {
    inputs.emplace_back("rvq", inputs.empty() ? x : inputs[0].x, codebook, metric);
    if (codebook.dim() != codebooks[0].dim() || inputs.back().sizes.d != inputs[0].sizes.d)
      throw std::runtime_error("rvq: codebooks must all be [K, d], or all [S, K, d], with the same d");
  }
  return inputs;
}

// Transposes [stages][positions] to [positions][stages].
void transpose(const std::vector<int64_t>& from, int64_t stages, int64_t positions, int64_t* to) {
  for (int64_t stage = 0; stage < stages; ++stage) {
    for (int64_t i = 0; i < positions; ++i) to[i * stages + stage] = from[stage * positions + i];
  }
}

void write_losses(const std::vector<double>& errors, double factor, Tensor& losses) {
  for (size_t i = 0; i < errors.size(); ++i) {
    const double mean = errors[i] * factor;
    if (losses.scalar_type() == ScalarType::Double) {
      static_cast<double*>(losses.mutable_data_ptr())[i] = mean;
    } else {
      static_cast<float*>(losses.mutable_data_ptr())[i] = static_cast<float>(mean);
    }
  }
}

// Runs rvq. `rotation` is for the backward pass only.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rvq(const Tensor& x, std::vector<Tensor> codebooks,
                                                       std::string metric, bool exact, bool with_sums,
                                                       double codebook_weight, double commitment_weight,
                                                       bool /*rotation*/) {
  const std::vector<SearchInput> inputs = inputs_of(x, codebooks, metric);
  const SearchInput& first = inputs[0];
  const int64_t stages = static_cast<int64_t>(inputs.size()), segments = first.sizes.segments,
                d = first.sizes.d, positions = x.numel() / d;
  const ScalarType dtype = x.scalar_type();
  int64_t codewords = 0;
  for (const SearchInput& input : inputs) codewords += input.sizes.codebooks * input.sizes.k;

  Tensor total = torch::stable::new_zeros(x, x.sizes());
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = segments;
  shape.push_back(stages);
  Tensor indices = torch::stable::new_empty(x, shape, ScalarType::Long);
  Tensor losses = torch::stable::new_empty(
      x, {stages}, dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
  Tensor counts = torch::stable::new_zeros(x, {codewords}, ScalarType::Long);
  Tensor sums = torch::stable::new_empty(x, {with_sums ? codewords : 0, d}, ScalarType::Double);
  Tensor residual = torch::stable::new_empty(x, {stages > 1 ? x.numel() : 0});

  cpu::RvqRun run{.x = first.rows,
                  .stages = {},
                  .metric = first.metric,
                  .exact = exact,
                  .few = !with_sums,  // sums need all codewords in float64
                  .residual = residual.mutable_data_ptr(),
                  .total = total.mutable_data_ptr()};
  std::vector<Tensor> converted;  // owns the codebooks in the dtype of x
  std::vector<int64_t> chosen(stages * positions);
  int64_t before = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    const SearchInput& input = inputs[stage];
    converted.push_back(input.codebook.scalar_type() == dtype ? input.codebook
                                                              : torch::stable::to(input.codebook, dtype));
    run.few = run.few && cpu::Search::few(input.rows, input.codebooks_view);
    run.stages.push_back(
        {.codebooks = input.codebooks_view,
         .codewords = converted.back().const_data_ptr(),
         .indices = chosen.data() + stage * positions,
         .counts = static_cast<int64_t*>(counts.mutable_data_ptr()) + before,
         .sums = with_sums ? static_cast<double*>(sums.mutable_data_ptr()) + before * d : nullptr});
    before += input.sizes.codebooks * input.sizes.k;
  }
  const cpu::Parallel blocks = [&](int64_t count, const std::function<void(int64_t, int64_t)>& work) {
    for_blocks(run.few, count, work);
  };
  const std::vector<double> errors = cpu::rvq(run, in_parallel, blocks);
  transpose(chosen, stages, positions, static_cast<int64_t*>(indices.mutable_data_ptr()));
  write_losses(errors,
               (codebook_weight + commitment_weight) / static_cast<double>(std::max<int64_t>(1, x.numel())),
               losses);
  return {total, indices, losses, counts, sums};
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) { m.impl("rvq", TORCH_BOX(&uefl::rvq)); }
