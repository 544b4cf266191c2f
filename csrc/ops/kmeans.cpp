// Registers kmeans and kmeans_step for the CPU.
#include "cpu/kmeans.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <numeric>
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

void require(bool condition, const char* expected, const char* op = "kmeans: ") {
  if (!condition) throw std::runtime_error(std::string(op) + expected);
}

bool has_shape(const Tensor& tensor, const std::vector<int64_t>& shape, ScalarType dtype) {
  return tensor.is_cpu() && tensor.scalar_type() == dtype &&
         std::vector<int64_t>(tensor.sizes().begin(), tensor.sizes().end()) == shape;
}

ScalarType center_dtype(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

bool has_valid_dtype(const Tensor& x) {
  const ScalarType dtype = x.scalar_type();
  return dtype == center_dtype(x) || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

const double* doubles(const Tensor& tensor) { return static_cast<const double*>(tensor.const_data_ptr()); }

cpu::Seeding seeding_of(const std::string& method, bool given) {
  if (given) return cpu::Seeding::given;
  if (method == "k-means++") return cpu::Seeding::plus_plus;
  if (method == "k-means||") return cpu::Seeding::parallel;
  require(method == "random", "without init, method must be 'k-means++', 'k-means||' or 'random'");
  return cpu::Seeding::random;
}

void in_parallel(int64_t count, const std::function<void(int64_t, int64_t)>& work) {
  torch::stable::parallel_for(0, count, 1, work);
}

void alone(int64_t count, const std::function<void(int64_t, int64_t)>& work) { work(0, count); }

// Throws the same error, with the number of the problem after the name of the op.
[[noreturn]] void rethrow_as(int64_t problem, const std::exception_ptr& error) {
  const std::string op = "kmeans: ";
  try {
    std::rethrow_exception(error);
  } catch (const std::runtime_error& found) {
    const std::string what = found.what();
    if (what.rfind(op, 0) != 0) throw;
    throw std::runtime_error(op + "problem " + std::to_string(problem) + ": " + what.substr(op.size()));
  }
}

// Solves one problem, or several with one per thread.
void solve(const std::vector<cpu::KMeansProblem>& work, const cpu::KMeansOptions& options) {
  if (work.size() == 1) return cpu::kmeans(work[0], options, in_parallel);
  const int64_t problems = static_cast<int64_t>(work.size());
  std::vector<std::exception_ptr> errors(problems);  // an exception must not leave the thread
  in_parallel(problems, [&](int64_t lo, int64_t hi) {
    for (int64_t p = lo; p < hi; ++p) {
      try {
        cpu::kmeans(work[p], options, alone);
      } catch (...) {
        errors[p] = std::current_exception();
      }
    }
  });
  for (int64_t p = 0; p < problems; ++p) {
    if (errors[p]) rethrow_as(p, errors[p]);
  }
}

// Checks the sizes of the problems and the tensors of all problems, which follow one another.
void check_problems(const Tensor& x, const std::optional<Tensor>& weights, const std::optional<Tensor>& init,
                    const std::vector<int64_t>& sizes, const std::vector<int64_t>& clusters, size_t seeds) {
  const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const int64_t centers = std::accumulate(clusters.begin(), clusters.end(), int64_t{0});
  require(x.is_cpu() && x.dim() == 2 && x.size(1) > 0 && x.size(0) == rows,
          "x must have shape [sum of sizes, d], on the CPU");
  require(has_valid_dtype(x), "x must be float32, bfloat16, float16 or float64");
  require(clusters.size() == sizes.size() && seeds == sizes.size(),
          "sizes, clusters and seeds must have the same length");
  for (size_t p = 0; p < sizes.size(); ++p)
    require(1 <= clusters[p] && clusters[p] <= sizes[p],
            "clusters of a problem must be from 1 to the number of its rows");
  require(!weights || has_shape(*weights, {rows}, ScalarType::Double),
          "weights must be float64 of shape [sum of sizes]");
  require(!init || has_shape(*init, {centers, x.size(1)}, center_dtype(x)),
          "init must have shape [sum of clusters, d], and be float64 for float64 x, otherwise float32");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> kmeans(const Tensor& x_given, std::optional<Tensor> weights_given,
                                                  std::optional<Tensor> init_given,
                                                  std::vector<int64_t> sizes, std::vector<int64_t> clusters,
                                                  std::vector<int64_t> seeds, std::string method,
                                                  bool spherical, int64_t n_init, int64_t max_iter,
                                                  double tol) {
  check_problems(x_given, weights_given, init_given, sizes, clusters, seeds.size());
  require(n_init >= 1 && max_iter >= 1, "n_init and max_iter must be at least 1");
  const int64_t problems = static_cast<int64_t>(sizes.size()), rows = x_given.size(0), d = x_given.size(1);
  const int64_t centers_count = std::accumulate(clusters.begin(), clusters.end(), int64_t{0});
  const ScalarType out = center_dtype(x_given);
  const Tensor weights = weights_given ? torch::stable::contiguous(*weights_given) : x_given;
  const Tensor init = init_given ? torch::stable::contiguous(*init_given) : x_given;
  Tensor centers = torch::stable::new_empty(x_given, {centers_count, d}, out);
  Tensor labels = torch::stable::new_empty(x_given, {rows}, ScalarType::Long);
  Tensor inertia = torch::stable::new_empty(x_given, {problems}, ScalarType::Double);
  Tensor iterations = torch::stable::new_empty(x_given, {problems}, ScalarType::Long);

  const cpu::KMeansOptions options{seeding_of(method, init_given.has_value()), spherical, n_init, max_iter,
                                   tol};
  const int64_t bytes = d * (out == ScalarType::Double ? 8 : 4);
  std::vector<cpu::KMeansProblem> work;
  for (int64_t p = 0, row = 0, center = 0; p < problems; row += sizes[p], center += clusters[p], ++p) {
    const auto from = [](const Tensor& tensor, int64_t offset) {
      return static_cast<const char*>(tensor.const_data_ptr()) + offset;
    };
    const cpu::Dtype type = dtype_of(x_given);
    const cpu::StridedRows view{from(x_given, row * x_given.stride(0) * cpu::element_size(type)),
                                type,
                                sizes[p],
                                1,
                                d,
                                x_given.stride(0),
                                0,
                                x_given.stride(1)};
    work.push_back(
        {.x = view,
         .weights = weights_given ? reinterpret_cast<const double*>(from(weights, row * 8)) : nullptr,
         .init = init_given ? from(init, center * bytes) : nullptr,
         .k = clusters[p],
         .seed = static_cast<uint64_t>(seeds[p]),
         .result = {.centers = static_cast<char*>(centers.mutable_data_ptr()) + center * bytes,
                    .labels = static_cast<int64_t*>(labels.mutable_data_ptr()) + row,
                    .inertia = static_cast<double*>(inertia.mutable_data_ptr()) + p,
                    .iterations = static_cast<int64_t*>(iterations.mutable_data_ptr()) + p}});
  }
  solve(work, options);
  return {centers, labels, inertia, iterations};
}

// Checks x, the centers, the weights and the units of one step.
void check_step(const Tensor& x, const Tensor& centers, const std::optional<Tensor>& weights,
                const Tensor& middle, const Tensor& scale, const Tensor& mass_scale) {
  const auto expect = [](bool condition, const char* expected) {
    require(condition, expected, "kmeans_step: ");
  };
  expect(x.is_cpu() && x.dim() == 2 && x.size(1) > 0, "x must have shape [N, d], on the CPU");
  expect(has_valid_dtype(x), "x must be float32, bfloat16, float16 or float64");
  const int64_t n = x.size(0), d = x.size(1), k = centers.dim() == 2 ? centers.size(0) : 0;
  expect(k > 0 && has_shape(centers, {k, d}, center_dtype(x)),
         "centers must have shape [k, d], and be float64 for float64 x, otherwise float32");
  expect(!weights || has_shape(*weights, {n}, ScalarType::Double), "weights must be float64 of shape [N]");
  expect(has_shape(middle, {d}, ScalarType::Double) && has_shape(scale, {d}, ScalarType::Double) &&
             has_shape(mass_scale, {}, ScalarType::Double),
         "middle, scale and mass_scale must be float64 of shapes [d], [d] and []");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> kmeans_step(const Tensor& x, const Tensor& centers_given,
                                                       std::optional<Tensor> weights_given,
                                                       const Tensor& middle_given, const Tensor& scale_given,
                                                       const Tensor& mass_scale, bool with_inertia) {
  const auto expect = [](bool condition, const char* expected) {
    require(condition, expected, "kmeans_step: ");
  };
  check_step(x, centers_given, weights_given, middle_given, scale_given, mass_scale);
  const int64_t n = x.size(0), d = x.size(1), k = centers_given.size(0);
  const Tensor centers = torch::stable::contiguous(centers_given),
               weights = torch::stable::contiguous(weights_given.value_or(middle_given));
  const Tensor middle = torch::stable::contiguous(middle_given),
               scale = torch::stable::contiguous(scale_given);
  expect(n == 0 || doubles(mass_scale)[0] * n <= 0x1p62,
         "units come from a step on fewer rows than x has; use the units of a step on all rows");
  if (weights_given) {
    for (int64_t i = 0; i < n; ++i) {
      expect(0 <= doubles(weights)[i] && doubles(weights)[i] <= 1,
             "weights must be finite, not negative and at most the largest weight of the step of the units");
    }
  }
  Tensor labels = torch::stable::new_empty(x, {n}, ScalarType::Long),
         inertia = torch::stable::new_zeros(x, {}, ScalarType::Double);
  Tensor sums = torch::stable::new_empty(x, {k, d}, ScalarType::Long),
         masses = torch::stable::new_empty(x, {k}, ScalarType::Long);

  for (int64_t i = 0; i < k * d; ++i) {
    const double value = dtype_of(centers) == cpu::Dtype::f64
                             ? doubles(centers)[i]
                             : static_cast<const float*>(centers.const_data_ptr())[i];
    expect(std::abs(value) <= cpu::kLargest, "centers must be finite, and at most 2^480 (3e144)");
  }
  const cpu::Search search({centers.const_data_ptr(), dtype_of(centers), 1, k, d}, cpu::Metric::l2, true,
                           "kmeans_step", in_parallel);
  const cpu::StridedRows rows{x.const_data_ptr(), dtype_of(x), n, 1, d, x.stride(0), 0, x.stride(1)};
  const double masses_scale = *doubles(mass_scale);
  const cpu::KMeansUnits units{cpu::rounding_of(doubles(middle), doubles(scale), masses_scale),
                               weights_given ? doubles(weights) : nullptr, masses_scale};
  cpu::KMeansTotals totals(k, d);
  std::vector<double> distances(with_inertia ? n : 0);
  int64_t* out = static_cast<int64_t*>(labels.mutable_data_ptr());
  std::fill(out, out + n, -1);
  cpu::kmeans_step(rows, search, centers.const_data_ptr(), units, in_parallel, out, totals,
                   with_inertia ? distances.data() : nullptr);
  std::copy(totals.sums.begin(), totals.sums.end(), static_cast<int64_t*>(sums.mutable_data_ptr()));
  std::copy(totals.masses.begin(), totals.masses.end(), static_cast<int64_t*>(masses.mutable_data_ptr()));
  if (with_inertia) {
    for (int64_t i = 0; i < n; ++i) {
      expect(std::isfinite(distances[i]), "x holds NaN or infinity; remove or replace those rows");
      distances[i] *= units.weight(i);
    }
    *static_cast<double*>(inertia.mutable_data_ptr()) = cpu::tree_sum(std::move(distances));
  }
  return {labels, sums, masses, inertia};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> kmeans_units(const Tensor& x,
                                                        std::optional<Tensor> weights_given) {
  const auto expect = [](bool condition, const char* expected) {
    require(condition, expected, "kmeans_units: ");
  };
  expect(x.is_cpu() && x.dim() == 2 && has_valid_dtype(x),
         "x must have shape [N, d], on the CPU: float32, bfloat16, float16 or float64");
  const int64_t n = x.size(0), d = x.size(1);
  expect(!weights_given || has_shape(*weights_given, {n}, ScalarType::Double),
         "weights must be float64 of shape [N]");
  const Tensor weights = weights_given ? torch::stable::contiguous(*weights_given) : x;
  const cpu::StridedRows rows{x.const_data_ptr(), dtype_of(x), n, 1, d, x.stride(0), 0, x.stride(1)};
  const cpu::KMeansScales found =
      cpu::kmeans_scales(rows, weights_given ? doubles(weights) : nullptr, in_parallel, "kmeans_step");
  const auto filled = [&](std::vector<int64_t> shape, const double* values) {
    Tensor tensor = torch::stable::new_empty(x, shape, ScalarType::Double);
    std::copy(values, values + tensor.numel(), static_cast<double*>(tensor.mutable_data_ptr()));
    return tensor;
  };
  return {filled({d}, found.middle.data()), filled({d}, found.scale.data()), filled({}, &found.mass_scale),
          filled({}, &found.weight_unit)};
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) {
  m.impl("kmeans", TORCH_BOX(&uefl::kmeans));
  m.impl("kmeans_step", TORCH_BOX(&uefl::kmeans_step));
  m.impl("kmeans_units", TORCH_BOX(&uefl::kmeans_units));
}
