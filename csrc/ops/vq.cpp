// Registers vq_assign, vq and its gradient for the CPU, with checks of shapes.
#include "cpu/vq.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/vq_backward.h"
#include "ops/check_backward.h"
#include "ops/search_input.h"

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor vq_assign(const Tensor& x, const Tensor& codebook, std::string metric, bool exact) {
  const SearchInput input("vq_assign", x, codebook, metric);
  Tensor indices = input.new_indices();
  const bool few = cpu::Search::few(input.rows, input.codebooks_view);
  const cpu::Search search(input.codebooks_view, input.metric, exact, "vq_assign", in_parallel, few);
  const cpu::StridedRows rows = search.flatten_segments(input.rows);
  const int64_t n = rows.outer * rows.inner, step = search.block_rows(rows.dim);
  int64_t* out = static_cast<int64_t*>(indices.mutable_data_ptr());
  for_blocks(few, (n + step - 1) / step,
             [&](int64_t lo, int64_t hi) { search.assign(rows, lo * step, std::min(n, hi * step), out); });
  return indices;
}

// Runs vq. `rotation` is for the backward pass only.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> vq(const Tensor& x, const Tensor& codebook,
                                                      std::string metric, bool exact, bool with_sums,
                                                      double codebook_weight, double commitment_weight,
                                                      bool /*rotation*/) {
  const SearchInput input("vq", x, codebook, metric);
  const ScalarType dtype = x.scalar_type(),
                   loss_dtype = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor codewords =
      codebook.scalar_type() == dtype ? input.codebook : torch::stable::to(input.codebook, dtype);
  const auto shape = codebook.sizes();
  Tensor quantized = torch::stable::new_empty(x, x.sizes());
  Tensor indices = input.new_indices();
  Tensor counts = torch::stable::new_zeros(x, shape.slice(0, shape.size() - 1), ScalarType::Long);
  Tensor sums = torch::stable::new_empty(
      x, with_sums ? std::vector<int64_t>(shape.begin(), shape.end()) : std::vector<int64_t>{0},
      ScalarType::Double);
  Tensor loss = torch::stable::new_empty(x, std::vector<int64_t>{}, loss_dtype);

  const bool few =
      !with_sums && cpu::Search::few(input.rows, input.codebooks_view);  // sums need all codewords in float64
  const cpu::Search search(input.codebooks_view, input.metric, exact, "vq", in_parallel, few);
  cpu::Vq run(search, input.codebooks_view, codewords.const_data_ptr(), input.rows,
              {quantized.mutable_data_ptr(), static_cast<int64_t*>(indices.mutable_data_ptr()),
               static_cast<int64_t*>(counts.mutable_data_ptr()),
               with_sums ? static_cast<double*>(sums.mutable_data_ptr()) : nullptr});
  for_blocks(few, run.blocks(), [&](int64_t lo, int64_t hi) { run.run(lo, hi); });
  if (with_sums) {
    torch::stable::parallel_for(0, run.blocks(), 1, [&](int64_t lo, int64_t hi) { run.add(lo, hi); });
    torch::stable::parallel_for(0, run.codeword_count(), 256,
                                [&](int64_t lo, int64_t hi) { run.write_sums(lo, hi); });
  }
  const double mean = run.error() * ((codebook_weight + commitment_weight) /
                                     static_cast<double>(std::max<int64_t>(1, x.numel())));
  if (loss_dtype == ScalarType::Double) {
    *static_cast<double*>(loss.mutable_data_ptr()) = mean;
  } else {
    *static_cast<float*>(loss.mutable_data_ptr()) = static_cast<float>(mean);
  }
  return {quantized, indices, loss, counts, sums};
}

// Returns the rows in a task of a thread, enough to pay for starting it.
int64_t backward_rows(int64_t dim) { return std::max<int64_t>(1, (1 << 15) / dim); }

Tensor vq_backward(const Tensor& x, const Tensor& codebook, const Tensor& indices,
                   std::optional<Tensor> grad_quantized, const Tensor& pull, bool rotation) {
  SearchInput input("vq_backward", x, codebook, "l2");
  const SearchSizes& sizes = input.sizes;
  check_backward(x, indices, grad_quantized ? &*grad_quantized : nullptr, pull, sizes);
  const Tensor chosen = torch::stable::contiguous(indices);
  const int64_t *first = static_cast<const int64_t*>(chosen.const_data_ptr()), *last = first + chosen.numel();
  if (std::any_of(first, last, [&](int64_t index) { return index < 0 || index >= sizes.k; })) {
    throw std::runtime_error("vq_backward: indices must be at least 0 and below K = " +
                             std::to_string(sizes.k));
  }
  const bool wide = x.scalar_type() == ScalarType::Double || codebook.scalar_type() == ScalarType::Double;
  const Tensor codewords = torch::stable::to(input.codebook, wide ? ScalarType::Double : ScalarType::Float);
  Tensor g = grad_quantized.value_or(x), grad_x = torch::stable::empty_like(x), written = grad_x;
  cpu::VqBackward run{.x = input.rows,
                      .grad_quantized = rows_of(g),
                      .grad_x = rows_of(written),
                      .wide = wide,
                      .rotation = rotation,
                      .d = sizes.d,
                      .codebook_step = sizes.codebooks == 1 ? 0 : sizes.k,
                      .indices = first,
                      .codewords = codewords.const_data_ptr(),
                      .pull = pull.scalar_type() == ScalarType::Double
                                  ? *static_cast<const double*>(pull.const_data_ptr())
                                  : *static_cast<const float*>(pull.const_data_ptr())};
  if (!grad_quantized) run.grad_quantized.data = nullptr;
  torch::stable::parallel_for(0, run.x.outer * run.x.inner, backward_rows(run.x.dim),
                              [&](int64_t lo, int64_t hi) { cpu::vq_backward(run, lo, hi); });
  if (written.const_data_ptr() != grad_x.const_data_ptr()) torch::stable::copy_(grad_x, written);
  return grad_x;
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) {
  m.impl("vq_assign", TORCH_BOX(&uefl::vq_assign));
  m.impl("vq", TORCH_BOX(&uefl::vq));
  m.impl("vq_backward", TORCH_BOX(&uefl::vq_backward));
}
