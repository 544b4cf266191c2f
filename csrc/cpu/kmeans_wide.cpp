#include "cpu/kmeans_wide.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cpu/features.h"
#include "cpu/kmeans_kernel.h"
#include "cpu/kmeans_step.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kRows = 4;        // rows of a portion
constexpr int64_t kColumns = 1024;  // columns of a portion; their sums stay in the second-level cache

}  // namespace

// Returns true if distances are faster than a search, as measured (docs/design/kmeans-cpu.md).
bool distances_pay(const Dense& x, int64_t k) {
  constexpr int64_t kFewRows = 64, kSomeRows = 1024, kMostRows = 4096;
  constexpr int64_t kShort = 512, kWide = 1 << 14, kLongest = 1 << 16;
  if (x.n >= kMostRows || x.d < kShort) return false;
  return x.n <= kFewRows || x.d > kLongest || k <= (x.d >= kWide ? 64 : x.n <= kSomeRows ? 16 : 8);
}

WideLloyd::WideLloyd(const PreparedProblem& prepared, KMeansCenters centers, const KMeansOptions& options)
    : LloydAlgorithm(prepared.units(), prepared.weight_unit(), prepared.dense().n, std::move(centers),
                     options, prepared.parallel()),
      prepared_(prepared),
      dense_(prepared.dense()) {}

bool WideLloyd::assign() {
  const std::vector<int64_t> found = nearest();
  std::vector<int64_t> moved;
  for (int64_t i = 0; i < n_; ++i) {
    if (found[i] == labels_[i]) continue;
    moved.push_back(i);
    totals_.masses[found[i]] += units_.mass(i);
    if (labels_[i] >= 0) totals_.masses[labels_[i]] -= units_.mass(i);
  }
  add_moves(moved, found);
  labels_ = found;
  return !moved.empty();
}

std::vector<int64_t> WideLloyd::nearest() const {
  const double d = static_cast<double>(dense_.d), exact = (d + 8) * 0x1p-53;  // the error of the definition
  std::vector<int64_t> found(n_);
  std::vector<char> certain(n_);
  // Finds the nearest center by the distances to all centers. They have this relative error, and each of
  // their d terms can lose `lost` by underflow. Returns true if the center is certain.
  const auto find = [&](double* distances, double error, double lost, int64_t& nearest) {
    nearest = std::min_element(distances, distances + k_) - distances;
    const double best = std::exchange(distances[nearest], std::numeric_limits<double>::infinity()),
                 second = *std::min_element(distances, distances + k_);
    return second - best > 2.05 * (error + exact) * second + 4 * d * lost || k_ == 1;
  };
  parallel_((n_ + kRows - 1) / kRows, [&](int64_t lo, int64_t hi) {
    const int64_t first = lo * kRows, last = std::min(n_, hi * kRows);
    std::vector<double> scores((last - first) * k_);
    kmeans_kernel().scores(dense_, first, last, centers_.center(0), k_, scores.data());
    for (int64_t i = first; i < last; ++i) {
      double* row = &scores[(i - first) * k_];
      if (!dense_.wide) {
        certain[i] = find(row, kmeans_kernel().float_error + exact, 0x1p-126, found[i]);
        if (certain[i]) continue;
        for (int64_t k = 0; k < k_; ++k) row[k] = kmeans_kernel().distance(dense_, i, centers_.center(k));
      }
      certain[i] = find(row, exact, 0x1p-1022, found[i]);
    }
  });
  decide(certain, found);
  return found;
}

// Searches the nearest centers of the rows that are not certain.
void WideLloyd::decide(const std::vector<char>& certain, std::vector<int64_t>& found) const {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < n_; ++i) {
    if (!certain[i]) rows.push_back(i);
  }
  if (rows.empty()) return;
  const Search search({centers_.data(), dense_.wide ? Dtype::f64 : Dtype::f32, 1, k_, dense_.d}, Metric::l2,
                      true, "kmeans", parallel_);
  parallel_(static_cast<int64_t>(rows.size()), [&](int64_t lo, int64_t hi) {
    Search::Scratch scratch(search);
    for (int64_t i = lo; i < hi; ++i)
      search.assign(rows_of(dense_), rows[i], rows[i] + 1, found.data(), scratch);
  });
}

// Moves rows in the sums. Each thread takes some of the columns, so that no two threads add to the same sum.
void WideLloyd::add_moves(const std::vector<int64_t>& rows, const std::vector<int64_t>& found) {
  if (rows.empty()) return;
  const int64_t d = dense_.d;
  parallel_((d + kColumns - 1) / kColumns, [&](int64_t lo, int64_t hi) {
    for (int64_t first = lo * kColumns; first < std::min(d, hi * kColumns); first += kColumns) {
      const Dense part = dense_.columns(first, std::min(d, first + kColumns));
      const Rounding rounding = units_.rounding.from(first);
      const auto sums = [&](int64_t center) { return &totals_.sums[center * d + first]; };
      for (const int64_t row : rows) {
        if (labels_[row] < 0) {
          kmeans_kernel().add(part, &row, 1, rounding, units_.weights, sums(found[row]));
        } else {
          kmeans_kernel().move(part, row, rounding, units_.weight(row), sums(labels_[row]), sums(found[row]));
        }
      }
    }
  });
}

}  // namespace uefl::cpu
