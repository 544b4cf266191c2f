// What torch sees of vq_assign and vq on the CPU: shapes, dispatch-key registration.
#include "cpu/vq.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "common/check_search.h"
#include "cpu/vq_assign.h"
#include "ops/dtype.h"

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// x and the codebook as the kernels see them; holds the tensors whose memory they point to.
struct Input {
  Input(const std::string& op, const Tensor& x_given, const Tensor& codebook_given, const std::string& metric_name)
      : sizes(check_search(op, x_given, codebook_given, metric_name)),
        metric(metric_name == "l2" ? cpu::Metric::l2 : cpu::Metric::cosine),
        x(x_given),
        codebook(torch::stable::contiguous(codebook_given)),
        codes{codebook.const_data_ptr(), dtype_of(codebook), sizes.books, sizes.k, sizes.d} {
    const cpu::Dtype dtype = dtype_of(x);
    if (!cpu::view_rows(x.const_data_ptr(), dtype, x.sizes().data(), x.strides().data(), x.dim(), rows)) {
      x = torch::stable::contiguous(x);
      cpu::view_rows(x.const_data_ptr(), dtype, x.sizes().data(), x.strides().data(), x.dim(), rows);
    }
  }

  Tensor new_indices() const {
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = sizes.segments;
    return torch::stable::new_empty(x, shape, ScalarType::Long);
  }

  SearchSizes sizes;
  cpu::Metric metric;
  Tensor x, codebook;
  cpu::Codebook codes;
  cpu::Rows rows;
};

Tensor vq_assign(const Tensor& x, const Tensor& codebook, std::string metric, bool exact) {
  const Input input("vq_assign", x, codebook, metric);
  Tensor indices = input.new_indices();
  const cpu::Search search(input.codes, input.metric, exact);
  const cpu::Rows rows = search.flatten_segments(input.rows);
  const int64_t n = rows.outer * rows.inner, step = search.block_rows(rows.dim);
  int64_t* out = static_cast<int64_t*>(indices.mutable_data_ptr());
  torch::stable::parallel_for(0, (n + step - 1) / step, 1, [&](int64_t lo, int64_t hi) {
    for (int64_t block = lo; block < hi; ++block) search.assign(rows, block * step, std::min(n, (block + 1) * step), out);
  });
  return indices;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> vq(const Tensor& x, const Tensor& codebook, std::string metric, bool exact,
                                                      bool with_sums, double codebook_weight, double commitment_weight) {
  const Input input("vq", x, codebook, metric);
  const ScalarType dtype = x.scalar_type(), loss_dtype = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor codes = codebook.scalar_type() == dtype ? input.codebook : torch::stable::to(input.codebook, dtype);
  const auto shape = codebook.sizes();
  Tensor quantized = torch::stable::new_empty(x, x.sizes());
  Tensor indices = input.new_indices();
  Tensor counts = torch::stable::new_zeros(x, shape.slice(0, shape.size() - 1), ScalarType::Long);
  Tensor sums = torch::stable::new_empty(x, with_sums ? std::vector<int64_t>(shape.begin(), shape.end()) : std::vector<int64_t>{0},
                                         ScalarType::Double);
  Tensor loss = torch::stable::new_empty(x, std::vector<int64_t>{}, loss_dtype);

  const cpu::Search search(input.codes, input.metric, exact, "vq");
  cpu::Vq run(search, input.codes, codes.const_data_ptr(), input.rows,
              {quantized.mutable_data_ptr(), static_cast<int64_t*>(indices.mutable_data_ptr()),
               static_cast<int64_t*>(counts.mutable_data_ptr()), with_sums ? static_cast<double*>(sums.mutable_data_ptr()) : nullptr});
  torch::stable::parallel_for(0, run.blocks(), 1, [&](int64_t lo, int64_t hi) { run.run(lo, hi); });
  if (with_sums) torch::stable::parallel_for(0, run.blocks(), 1, [&](int64_t lo, int64_t hi) { run.add(lo, hi); });
  const double mean = run.finish() * ((codebook_weight + commitment_weight) / static_cast<double>(std::max<int64_t>(1, x.numel())));
  if (loss_dtype == ScalarType::Double) {
    *static_cast<double*>(loss.mutable_data_ptr()) = mean;
  } else {
    *static_cast<float*>(loss.mutable_data_ptr()) = static_cast<float>(mean);
  }
  return {quantized, indices, loss, counts, sums};
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) {
  m.impl("vq_assign", TORCH_BOX(&uefl::vq_assign));
  m.impl("vq", TORCH_BOX(&uefl::vq));
}
