// Registers kmeans_labels and kmeans_distances for the CPU.
#include "cpu/kmeans_labels.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ops/dtype.h"

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void in_parallel(int64_t count, const std::function<void(int64_t, int64_t)>& work) {
  torch::stable::parallel_for(0, count, 1, work);
}

ScalarType center_dtype(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Returns x as rows, after the check against the centers [k, d] of the dtype.
cpu::StridedRows rows_of(const Tensor& x, const Tensor& centers, ScalarType dtype) {
  const auto require = [](bool condition, const char* expected) {
    if (!condition) throw std::runtime_error(std::string("kmeans_labels: ") + expected);
  };
  const ScalarType type = x.scalar_type();
  require(x.is_cpu() && x.dim() == 2 && x.size(1) > 0, "x must have shape [N, d], on the CPU");
  require(type == center_dtype(x) || type == ScalarType::BFloat16 || type == ScalarType::Half,
          "x must be float32, bfloat16, float16 or float64");
  require(centers.is_cpu() && centers.dim() == 2 && centers.size(0) > 0 && centers.size(1) == x.size(1) &&
              centers.scalar_type() == dtype,
          "centers must have shape [k, d], on the CPU, and the dtype of the result");
  return {x.const_data_ptr(), dtype_of(x), x.size(0), 1, x.size(1), x.stride(0), 0, x.stride(1)};
}

std::tuple<Tensor, Tensor> kmeans_labels(const Tensor& x, const Tensor& centers_given, bool with_distances) {
  const cpu::StridedRows rows = rows_of(x, centers_given, center_dtype(x));
  const Tensor centers = torch::stable::contiguous(centers_given);
  const int64_t n = x.size(0), k = centers.size(0), d = x.size(1);
  Tensor labels = torch::stable::new_empty(x, {n}, ScalarType::Long);
  Tensor distances = torch::stable::new_empty(x, {with_distances ? n : 0}, ScalarType::Double);
  const cpu::Search search({centers.const_data_ptr(), dtype_of(centers), 1, k, d}, cpu::Metric::l2, true,
                           "kmeans_labels", in_parallel);
  cpu::kmeans_labels(rows, search, centers.const_data_ptr(), in_parallel,
                     static_cast<int64_t*>(labels.mutable_data_ptr()),
                     with_distances ? static_cast<double*>(distances.mutable_data_ptr()) : nullptr);
  return {labels, distances};
}

Tensor kmeans_distances(const Tensor& x, const Tensor& centers_given) {
  const cpu::StridedRows rows = rows_of(x, centers_given, ScalarType::Double);
  const Tensor centers = torch::stable::contiguous(centers_given);
  const int64_t k = centers.size(0);
  Tensor distances = torch::stable::new_empty(x, {x.size(0), k}, center_dtype(x));
  cpu::kmeans_distances(rows, static_cast<const double*>(centers.const_data_ptr()), k, in_parallel,
                        distances.mutable_data_ptr());
  return distances;
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) {
  m.impl("kmeans_labels", TORCH_BOX(&uefl::kmeans_labels));
  m.impl("kmeans_distances", TORCH_BOX(&uefl::kmeans_distances));
}
