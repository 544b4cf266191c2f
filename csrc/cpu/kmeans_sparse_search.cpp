#include "cpu/kmeans_sparse_search.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/features.h"
#include "cpu/kmeans_problem.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kCanceled = 0x1p-20;  // a squared distance below this part of |x|^2 + |c|^2 has lost digits
constexpr int64_t kColumns = 8;        // columns that are transposed together: one cache line of each center

// Throws an error if a value cannot be clustered.
void require_finite(const SparseRows& x, const char* op) {
  double largest = 0;
  for (int64_t i = x.offsets[0]; i < x.offsets[x.n]; ++i) {
    if (!std::isfinite(x.value(i)))
      throw std::runtime_error(std::string(op) + ": x holds NaN or infinity; remove or replace those rows");
    largest = std::max(largest, std::abs(x.value(i)));
  }
  if (largest > kLargest)
    throw std::runtime_error(
        std::string(op) + ": x holds values beyond 2^480 (3e144), and their squares overflow; scale x down");
}

}  // namespace

const KMeansSparseKernel& kmeans_sparse_kernel() {
  return pick<&kmeans_sparse_portable, &kmeans_sparse_avx2, &kmeans_sparse_avx512>();
}

bool in_order(const SparseRows& x, int64_t columns, const Parallel& parallel) {
  const int64_t* const offsets = x.offsets;
  if (offsets[0] != 0 || offsets[x.n] != columns || !std::is_sorted(offsets, offsets + x.n + 1)) return false;
  std::atomic<bool> ordered = true;
  parallel(x.n, [&](int64_t lo, int64_t hi) {
    // Counts the columns that are not above the column before them, in one long loop over all rows. At the
    // beginning of a row such a column is allowed, and is subtracted below.
    const int64_t begin = offsets[lo];
    int64_t falls = kmeans_sparse_kernel().falls(x.columns + begin, offsets[hi] - begin);
    bool inside = true;
    for (int64_t row = lo; row < hi; ++row) {
      const int64_t first = offsets[row], end = offsets[row + 1];
      if (first == end) continue;
      inside = inside && x.columns[first] >= 0 && x.columns[end - 1] < x.d;
      falls -= first > begin && x.columns[first] <= x.columns[first - 1];
    }
    if (!inside || falls != 0) ordered = false;
  });
  return ordered;
}

std::vector<double> sparse_squares(const SparseRows& x, const Parallel& parallel, const char* op) {
  std::vector<double> squares(x.n);
  std::atomic<bool> small = true;
  parallel(x.n, [&](int64_t lo, int64_t hi) {
    const KMeansSparseKernel& kernel = kmeans_sparse_kernel();
    bool all = true;
    for (int64_t i = lo; i < hi; ++i) {
      squares[i] = kernel.square(x.row(i));
      all = all && squares[i] <= kLargest * kLargest;
    }
    if (!all) small = false;
  });
  if (!small) require_finite(x, op);
  return squares;
}

CenterColumns::CenterColumns(const double* centers, int64_t k, int64_t d, const Parallel& parallel)
    : pitch_((k + kSparsePad - 1) / kSparsePad * kSparsePad),
      lines_(new CacheLine[d * pitch_ * sizeof(double) / sizeof(CacheLine)]) {
  double* const columns = reinterpret_cast<double*>(lines_.get());
  parallel((d + kColumns - 1) / kColumns, [&](int64_t lo, int64_t hi) {
    for (int64_t start = lo * kColumns; start < std::min(d, hi * kColumns); start += kColumns) {
      const int64_t end = std::min(d, start + kColumns);
      for (int64_t c = 0; c < pitch_; ++c) {
        for (int64_t j = start; j < end; ++j) columns[j * pitch_ + c] = c < k ? centers[c * d + j] : 0;
      }
    }
  });
}

SparseSearch::SparseSearch(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel)
    : x_(x),
      centers_(centers),
      k_(k),
      columns_(centers, k, x.d, parallel),
      norms_(k),
      half_norms_(columns_.pitch(), kInfinity),
      supports_(new Support[k]) {
  const int64_t d = x.d;
  parallel(k, [&](int64_t lo, int64_t hi) {
    for (int64_t c = lo; c < hi; ++c) {
      norms_[c] = square_norm(centers_ + c * d, d);
      half_norms_[c] = norms_[c] / 2;
    }
  });
  radius_ = std::sqrt(*std::max_element(norms_.begin(), norms_.end()));
  drop_duplicates();
}

// Drops centers that are equal to an earlier one. Such a center never wins, and a tie of the two would go to
// the definition for each row.
void SparseSearch::drop_duplicates() {
  const int64_t d = x_.d;
  for (int64_t c = 1; c < k_; ++c) {
    const double* center = centers_ + c * d;
    for (int64_t other = 0; other < c && half_norms_[c] < kInfinity; ++other) {
      if (norms_[other] == norms_[c] && std::equal(center, center + d, centers_ + other * d))
        half_norms_[c] = kInfinity;
    }
  }
}

double SparseSearch::error(double square) const {
  const double length = std::sqrt(square), both = length + radius_;
  return 1.01 * static_cast<double>(x_.d + 8) * 0x1p-53 *
             (length * radius_ + radius_ * radius_ / 2 + both * both / 2) +
         0x1p-1000;
}

double SparseSearch::from_products(double square, const double* products, int64_t k) const {
  return std::max(0.0, square - 2 * products[k] + norms_[k]);
}

int64_t SparseSearch::nearest(int64_t row, double square, double* products, double& distance) const {
  columns_.products(x_.row(row), products);
  const SparseTopTwo found = kmeans_sparse_kernel().top_two(products, half_norms_.data(), columns_.pitch());
  int64_t best = found.index;
  const double margin = 2 * error(square);
  if (!(found.second - found.best > margin)) {
    double least = kInfinity;
    for (int64_t k = 0; k < k_; ++k) {
      if (half_norms_[k] - products[k] > found.best + margin) continue;
      const double value = definition(row, k);
      if (value < least) least = value, best = k;
    }
  }
  distance = from_products(square, products, best);
  return best;
}

template <class T>
void SparseSearch::distances(int64_t row, double square, double* products, T* out) const {
  columns_.products(x_.row(row), products);
  for (int64_t k = 0; k < k_; ++k) {
    const double found = from_products(square, products, k);
    const bool canceled = !(found >= kCanceled * (square + norms_[k]));
    out[k] = static_cast<T>(std::sqrt(canceled ? distance(row, k) : found));
  }
}
template void SparseSearch::distances(int64_t, double, double*, float*) const;
template void SparseSearch::distances(int64_t, double, double*, double*) const;

// Calls add(column, difference) for each column in which the row or the center is not zero, in the order of
// the columns.
template <class Add>
void SparseSearch::for_differences(int64_t row, int64_t k, const Add& add) const {
  const double* center = centers_ + k * x_.d;
  Support& support = supports_[k];
  std::call_once(support.once, [&] {
    for (int64_t j = 0; j < x_.d; ++j) {
      if (center[j] != 0) support.columns.push_back(static_cast<int32_t>(j));
    }
  });
  int64_t i = x_.offsets[row];
  const int64_t end = x_.offsets[row + 1];
  for (const int32_t column : support.columns) {
    for (; i < end && x_.columns[i] < column; ++i) add(x_.columns[i], x_.value(i));
    const bool both = i < end && x_.columns[i] == column;
    add(column, (both ? x_.value(i++) : 0) - center[column]);
  }
  for (; i < end; ++i) add(x_.columns[i], x_.value(i));
}

double SparseSearch::definition(int64_t row, int64_t k) const {
  double total = 0;
  for_differences(row, k, [&](int64_t, double difference) { total += difference * difference; });
  return total;
}

double SparseSearch::distance(int64_t row, int64_t k) const {
  double total[8] = {};
  for_differences(row, k,
                  [&](int64_t column, double difference) { total[column % 8] += difference * difference; });
  return ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
}

}  // namespace uefl::cpu
