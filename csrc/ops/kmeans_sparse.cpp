// Registers k-means of sparse rows for the CPU.
#include "cpu/kmeans_sparse.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ops/dtype.h"

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void require(bool condition, const char* expected) {
  if (!condition) throw std::runtime_error(std::string("kmeans_sparse: ") + expected);
}

void in_parallel(int64_t count, const std::function<void(int64_t, int64_t)>& work) {
  torch::stable::parallel_for(0, count, 1, work);
}

bool is_vector(const Tensor& tensor, ScalarType dtype) {
  return tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.dim() == 1 && tensor.is_contiguous();
}

bool is_matrix(const Tensor& tensor, ScalarType dtype, int64_t d) {
  return tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.dim() == 2 && tensor.size(0) > 0 &&
         tensor.size(1) == d;
}

// Returns the rows after a check of every index, because the kernels read without a check.
cpu::SparseRows rows_of(const Tensor& values, const Tensor& columns, const Tensor& offsets, int64_t d) {
  const ScalarType dtype = values.scalar_type();
  const int64_t count = values.numel(), n = offsets.numel() - 1;
  require((dtype == ScalarType::Double || dtype == ScalarType::Float) && is_vector(values, dtype),
          "values must be a contiguous float32 or float64 vector on the CPU");
  require(is_vector(columns, ScalarType::Int) && columns.numel() == count,
          "columns must be a contiguous int32 vector on the CPU, as long as values");
  require(is_vector(offsets, ScalarType::Long) && n >= 0,
          "offsets must be a contiguous int64 vector on the CPU, of n + 1 elements for n rows");
  const cpu::SparseRows x{values.const_data_ptr(),
                          dtype == ScalarType::Double,
                          static_cast<const int32_t*>(columns.const_data_ptr()),
                          static_cast<const int64_t*>(offsets.const_data_ptr()),
                          n,
                          d};
  const auto by_rows = [](int64_t rows, const auto& work) {
    torch::stable::parallel_for(0, rows, 1024, work);
  };
  require(in_order(x, count, by_rows),
          "columns must ascend in each row, from 0 to d - 1, and offsets from 0 to the length of values");
  return x;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> kmeans_sparse(const Tensor& values, const Tensor& columns,
                                                         const Tensor& offsets, const Tensor& init_given,
                                                         std::optional<Tensor> weights_given, bool spherical,
                                                         int64_t max_iter, double tol) {
  const int64_t d = init_given.dim() == 2 ? init_given.size(1) : 0;
  const cpu::SparseRows x = rows_of(values, columns, offsets, d);
  require(is_matrix(init_given, values.scalar_type(), d),
          "init must have shape [k, d], on the CPU, and the dtype of values");
  require(x.n > 0 && max_iter >= 1, "x must have at least one row, and max_iter must be at least 1");
  require(!weights_given || (is_vector(*weights_given, ScalarType::Double) && weights_given->numel() == x.n),
          "weights must be a contiguous float64 vector on the CPU, with one weight for each row");
  const Tensor init = torch::stable::contiguous(init_given);
  const int64_t k = init.size(0);
  Tensor centers = torch::stable::new_empty(values, {k, d}),
         labels = torch::stable::new_empty(values, {x.n}, ScalarType::Long),
         inertia = torch::stable::new_empty(values, {}, ScalarType::Double),
         iterations = torch::stable::new_empty(values, {}, ScalarType::Long);
  cpu::kmeans_sparse(x, weights_given ? static_cast<const double*>(weights_given->const_data_ptr()) : nullptr,
                     init.const_data_ptr(), k, {cpu::Seeding::given, spherical, 1, max_iter, tol},
                     in_parallel,
                     {.centers = centers.mutable_data_ptr(),
                      .labels = static_cast<int64_t*>(labels.mutable_data_ptr()),
                      .inertia = static_cast<double*>(inertia.mutable_data_ptr()),
                      .iterations = static_cast<int64_t*>(iterations.mutable_data_ptr())});
  return {centers, labels, inertia, iterations};
}

std::tuple<Tensor, Tensor> kmeans_sparse_labels(const Tensor& values, const Tensor& columns,
                                                const Tensor& offsets, const Tensor& centers_given) {
  const int64_t d = centers_given.dim() == 2 ? centers_given.size(1) : 0;
  const cpu::SparseRows x = rows_of(values, columns, offsets, d);
  require(is_matrix(centers_given, ScalarType::Double, d),
          "centers must be float64 of shape [k, d], on the CPU");
  const Tensor centers = torch::stable::contiguous(centers_given);
  Tensor labels = torch::stable::new_empty(values, {x.n}, ScalarType::Long),
         squares = torch::stable::new_empty(values, {x.n}, ScalarType::Double);
  cpu::kmeans_sparse_labels(x, static_cast<const double*>(centers.const_data_ptr()), centers.size(0),
                            in_parallel, static_cast<int64_t*>(labels.mutable_data_ptr()),
                            static_cast<double*>(squares.mutable_data_ptr()));
  return {labels, squares};
}

Tensor kmeans_sparse_distances(const Tensor& values, const Tensor& columns, const Tensor& offsets,
                               const Tensor& centers_given) {
  const int64_t d = centers_given.dim() == 2 ? centers_given.size(1) : 0;
  const cpu::SparseRows x = rows_of(values, columns, offsets, d);
  require(is_matrix(centers_given, ScalarType::Double, d),
          "centers must be float64 of shape [k, d], on the CPU");
  const Tensor centers = torch::stable::contiguous(centers_given);
  Tensor distances = torch::stable::new_empty(values, {x.n, centers.size(0)});
  cpu::kmeans_sparse_distances(x, static_cast<const double*>(centers.const_data_ptr()), centers.size(0),
                               in_parallel, distances.mutable_data_ptr());
  return distances;
}

Tensor kmeans_sparse_products(const Tensor& values, const Tensor& columns, const Tensor& offsets,
                              const Tensor& centers_given) {
  const int64_t d = centers_given.dim() == 2 ? centers_given.size(1) : 0;
  const cpu::SparseRows x = rows_of(values, columns, offsets, d);
  require(is_matrix(centers_given, ScalarType::Double, d),
          "centers must be float64 of shape [k, d], on the CPU");
  const Tensor centers = torch::stable::contiguous(centers_given);
  Tensor products = torch::stable::new_empty(values, {x.n, centers.size(0)}, ScalarType::Double);
  cpu::kmeans_sparse_products(x, static_cast<const double*>(centers.const_data_ptr()), centers.size(0),
                              in_parallel, static_cast<double*>(products.mutable_data_ptr()));
  return products;
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) {
  m.impl("kmeans_sparse", TORCH_BOX(&uefl::kmeans_sparse));
  m.impl("kmeans_sparse_labels", TORCH_BOX(&uefl::kmeans_sparse_labels));
  m.impl("kmeans_sparse_distances", TORCH_BOX(&uefl::kmeans_sparse_distances));
  m.impl("kmeans_sparse_products", TORCH_BOX(&uefl::kmeans_sparse_products));
}
