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
  constexpr int64_t kFewRows = 64, kMostRows = 4096, kShort = 512;
  constexpr int64_t kWide = 1 << 14, kWider = 1 << 15, kLongest = 1 << 16;
  if (x.n >= kMostRows || x.d < kShort) return false;
  return x.n <= kFewRows || x.d > kLongest || k <= (x.d < kWide ? 8 : x.d < kWider ? 32 : 64);
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
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double margin = 4.1 * static_cast<double>(dense_.d + 8) * 0x1p-53;
  std::vector<int64_t> found(n_);
  std::vector<char> certain(n_);
  parallel_((n_ + kRows - 1) / kRows, [&](int64_t lo, int64_t hi) {
    const int64_t first = lo * kRows, last = std::min(n_, hi * kRows);
    std::vector<double> scores((last - first) * k_);
    kmeans_kernel().scores(dense_, first, last, centers_.exact(0), k_, scores.data());
    for (int64_t i = first; i < last; ++i) {
      double* row = &scores[(i - first) * k_];
      found[i] = std::min_element(row, row + k_) - row;
      const double best = std::exchange(row[found[i]], kInfinity), second = *std::min_element(row, row + k_);
      certain[i] = second - best > margin * second + 0x1p-1000 || k_ == 1;
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
      for (const int64_t row : rows) {
        kmeans_kernel().move(part, row, units_.rounding.from(first), units_.weight(row),
                             &totals_.sums[found[row] * d + first],
                             labels_[row] < 0 ? nullptr : &totals_.sums[labels_[row] * d + first]);
      }
    }
  });
}

}  // namespace uefl::cpu
