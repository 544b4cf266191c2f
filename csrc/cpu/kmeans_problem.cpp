#include "cpu/kmeans_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <stdexcept>

namespace uefl::cpu {
namespace {

constexpr int64_t kRowsOfWork = 256;          // rows of a portion, for rows that cost little
constexpr int64_t kElementsOfWork = 1 << 20;  // elements of a portion of longer rows

}  // namespace

double square_norm(const double* values, int64_t d) {
  double total[8] = {};
  for (int64_t j = 0; j < d; ++j) total[j % 8] += values[j] * values[j];
  return ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
}

bool to_unit(double* values, int64_t d) {
  const double norm = std::sqrt(square_norm(values, d));
  for (int64_t j = 0; j < d; ++j)
    values[j] = norm == 0 ? 0 : values[j] / norm;  // NaN stays NaN, and is refused
  return std::any_of(values, values + d, [](double value) { return value != 0; });
}

void KMeansCenters::widen(int64_t first, int64_t last, double* values) const {
  const auto copy = [&](const auto* from) { std::copy(from + first * d_, from + last * d_, values); };
  size_ == 8 ? copy(reinterpret_cast<const double*>(data())) : copy(reinterpret_cast<const float*>(data()));
}

void KMeansCenters::set(int64_t k, const double* values) {
  const auto copy = [&]<class T>(T* to) {
    for (int64_t j = 0; j < d_; ++j) to[k * d_ + j] = static_cast<T>(values[j]);
  };
  size_ == 8 ? copy(reinterpret_cast<double*>(data_.data())) : copy(reinterpret_cast<float*>(data_.data()));
}

KMeansCenters given_centers(const void* init, int64_t k, int64_t d, bool wide, bool spherical) {
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<double> low(d, infinity), high(d, -infinity);
  bool valid =
      kmeans_kernel().range({static_cast<const char*>(init), wide, k, d}, 0, k, low.data(), high.data());
  for (int64_t j = 0; j < d; ++j) valid = valid && low[j] >= -kLargest && high[j] <= kLargest;
  if (!valid) throw std::runtime_error("kmeans: init must be finite, and at most 2^480 (3e144)");
  KMeansCenters centers(k, d, wide);
  centers.set(init);
  for (int64_t i = 0; i < k && spherical; ++i) {
    centers.widen(i, low.data());
    to_unit(low.data(), d);
    centers.set(i, low.data());
  }
  return centers;
}

int64_t grid_bits(int64_t n, int64_t d) {
  return std::min<int64_t>(kSeedingBits, (60 - ceil_log2(n * d)) / 2);
}

// Returns the scale of the grid. If the range of a column is below 2^e, the scale of the column is
// 2^(mass_bits - e).
double grid_scale(const KMeansScales& scales, int64_t n, int64_t bits) {
  return *std::min_element(scales.scale.begin(), scales.scale.end()) * power_of_two(bits - mass_bits(n));
}

double mean_variance(const std::vector<int64_t>& sums, const std::vector<int64_t>& squares, int64_t n,
                     double scale) {
  const double count = static_cast<double>(n);
  std::vector<double> variances(sums.size());
  for (size_t j = 0; j < sums.size(); ++j) {
    const double mean = static_cast<double>(sums[j]) / count;
    variances[j] = static_cast<double>(squares[j]) / count - mean * mean;
  }
  return tree_sum(variances) / static_cast<double>(sums.size()) / scale / scale;
}

template <class Body>
void PreparedProblem::for_rows(const Body& work) const {
  const int64_t n = dense_.n,
                step = std::clamp<int64_t>(kElementsOfWork / dense_.d / 32 * 32, 32, kRowsOfWork);
  parallel_((n + step - 1) / step, [&](int64_t lo, int64_t hi) { work(lo * step, std::min(n, hi * step)); });
}

PreparedProblem::PreparedProblem(const KMeansProblem& problem, const KMeansOptions& options,
                                 const Parallel& parallel)
    : parallel_(parallel) {
  make_dense(problem.x, options.spherical);
  scales_ = kmeans_scales(rows_of(dense_), problem.weights, parallel, "kmeans");
  const int64_t n = dense_.n, d = dense_.d;
  if (problem.weights) {
    weights_.resize(n);
    std::transform(problem.weights, problem.weights + n, weights_.begin(),
                   [&](double weight) { return weight / scales_.weight_unit; });
  }
  const bool seeding = options.seeding != Seeding::given;
  if (seeding || options.tol > 0) {
    const int64_t bits = grid_bits(n, d);
    make_seeder(bits, grid_scale(scales_, n, bits), seeding);
  }
}

void PreparedProblem::make_dense(const StridedRows& x, bool spherical) {
  DenseRows all(x);
  if (all.in_place() && !spherical) {
    dense_ = all.read(0, x.outer * x.inner);
    return;
  }
  const bool wide = x.dtype == Dtype::f64;
  dense_ = {nullptr, wide, x.outer * x.inner, x.dim};
  const int64_t n = dense_.n, d = dense_.d, bytes = d * (wide ? 8 : 4);
  copy_.resize(wide ? n * d : (n * d + 1) / 2);
  char* out = reinterpret_cast<char*>(copy_.data());
  dense_.data = out;
  for_rows([&](int64_t lo, int64_t hi) {
    DenseRows rows(x);
    std::memcpy(out + lo * bytes, rows.read(lo, hi).row(lo), (hi - lo) * bytes);
    if (!spherical) return;
    std::vector<double> values(d);
    const auto scale = [&](auto* row) {
      for (auto* end = row + (hi - lo) * d; row != end; row += d) {
        std::copy(row, row + d, values.begin());
        to_unit(values.data(), d);
        std::copy(values.begin(), values.end(), row);
      }
    };
    wide ? scale(reinterpret_cast<double*>(out + lo * bytes))
         : scale(reinterpret_cast<float*>(out + lo * bytes));
  });
}

// Rounds the rows to integers, and stores them for the seeding or only computes the variance.
void PreparedProblem::make_seeder(int64_t bits, double scale, bool keep) {
  const int64_t n = dense_.n, d = dense_.d;
  const std::vector<double> scales(d, scale);
  const Rounding rounding{scales_.middle.data(), scales.data()};
  if (keep) {
    // The mean of an evenly spaced sample is subtracted, because the squares of small numbers are small.
    constexpr int64_t kSample = 64;
    const int64_t count = std::min(n, kSample);
    std::vector<int16_t> values(d);
    std::vector<int64_t> sum(d), square(d);
    for (int64_t i = 0; i < count; ++i)
      kernel_.quantize(dense_, i * n / count, rounding, values.data(), sum.data(), square.data());
    for (int64_t j = 0; j < d; ++j)
      values[j] = static_cast<int16_t>(std::clamp<int64_t>(sum[j] / count, -kMostShift, kMostShift));
    seeder_ = std::make_unique<Seeder>(n, d, bits, weights_, std::move(values), parallel_);
  }
  std::vector<int64_t> sums(d), squares(d);
  std::mutex merge;
  const auto see = [&](const Dense& part, int64_t column, const auto& for_each_row) {
    std::vector<int64_t> sum(part.d), square(part.d);
    for_each_row([&](int64_t i, int16_t* values) {
      kernel_.quantize(part, i, rounding.from(column), values, sum.data(), square.data());
    });
    const std::lock_guard<std::mutex> lock(merge);
    for (int64_t j = 0; j < part.d; ++j) sums[column + j] += sum[j], squares[column + j] += square[j];
  };
  if (keep) {
    for_rows([&](int64_t lo, int64_t hi) {
      see(dense_, 0, [&](const auto& quantize) { seeder_->store(lo, hi, quantize); });
    });
  } else {
    for_parts(dense_, parallel_, [&](const Dense& part, int64_t column, int64_t lo, int64_t hi) {
      see(part, column, [&](const auto& quantize) {
        std::vector<int16_t> values(part.d);
        for (int64_t i = lo; i < hi; ++i) quantize(i, values.data());
      });
    });
  }
  variance_ = mean_variance(sums, squares, n, scale);
}

KMeansCenters PreparedProblem::seeds(Seeding seeding, int64_t k, uint64_t seed, int64_t restart) const {
  const std::vector<int64_t> chosen = seeder_->seeds(seeding, k, seed, restart);
  std::vector<char> rows;
  for (const int64_t row : chosen) rows.insert(rows.end(), dense_.row(row), dense_.row(row + 1));
  return given_centers(rows.data(), k, dense_.d, dense_.wide, false);
}

std::vector<double> PreparedProblem::distances(const KMeansCenters& centers, const int64_t* labels) const {
  std::vector<double> result(dense_.n);
  for_rows([&](int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) result[i] = kernel_.distance(dense_, i, centers.center(labels[i]));
  });
  return result;
}

}  // namespace uefl::cpu
