// The input of the ops that search on the CPU, and the division of their work among torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/vq_assign.h"
#include "ops/check_search.h"
#include "ops/dtype.h"

namespace uefl {

// Divides the codewords of a codebook among threads. A codebook may have few codewords.
inline void in_parallel(int64_t count, const std::function<void(int64_t, int64_t)>& work) {
  torch::stable::parallel_for(0, count, 16, work);
}

// Divides blocks of rows among threads. Only a search of few rows throws an error here, and the error must
// not pass through torch's threads.
template <class Body>
void for_blocks(bool few, int64_t blocks, const Body& work) {
  few ? work(0, blocks) : torch::stable::parallel_for(0, blocks, 1, work);
}

// Returns the rows of a tensor. If its strides do not allow that, the tensor becomes a contiguous copy.
inline cpu::StridedRows rows_of(torch::stable::Tensor& tensor) {
  cpu::StridedRows rows;
  const auto view = [&] {
    return cpu::view_rows(tensor.const_data_ptr(), dtype_of(tensor), tensor.sizes().data(),
                          tensor.strides().data(), tensor.dim(), rows);
  };
  if (!view()) {
    tensor = torch::stable::contiguous(tensor);
    view();
  }
  return rows;
}

// x and the codebook for the kernels, with the tensors that own their memory.
struct SearchInput {
  SearchInput(const std::string& op, const torch::stable::Tensor& x_given,
              const torch::stable::Tensor& codebook_given, const std::string& metric_name)
      : sizes(check_search(op, x_given, codebook_given, metric_name)),
        metric(metric_name == "l2" ? cpu::Metric::l2 : cpu::Metric::cosine),
        x(x_given),
        codebook(torch::stable::contiguous(codebook_given)),
        codebooks_view{codebook.const_data_ptr(), dtype_of(codebook), sizes.codebooks, sizes.k, sizes.d},
        rows(rows_of(x)) {}

  torch::stable::Tensor new_indices() const {
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = sizes.segments;
    return torch::stable::new_empty(x, shape, torch::headeronly::ScalarType::Long);
  }

  SearchSizes sizes;
  cpu::Metric metric;
  torch::stable::Tensor x, codebook;
  cpu::Codebooks codebooks_view;
  cpu::StridedRows rows;
};

}  // namespace uefl
