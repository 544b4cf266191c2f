#include "cpu/kmeans_lloyd.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

namespace uefl::cpu {

LloydAlgorithm::LloydAlgorithm(const KMeansUnits& units, double weight_unit, int64_t n, KMeansCenters centers,
                               const KMeansOptions& options, const Parallel& parallel)
    : units_(units),
      weight_unit_(weight_unit),
      n_(n),
      k_(centers.count()),
      spherical_(options.spherical),
      max_iter_(options.max_iter),
      parallel_(parallel),
      centers_(std::move(centers)),
      totals_(k_, centers_.dim()),
      labels_(n, -1) {}

void LloydAlgorithm::write(const KMeansResult& result) const {
  std::memcpy(result.centers, centers_.data(), centers_.bytes());
  std::copy(labels_.begin(), labels_.end(), result.labels);
  *result.inertia = inertia_;
  *result.iterations = iterations_;
}

void LloydAlgorithm::run(double limit) {
  bool converged = false;  // whether labels_ are the nearest current centers
  while (iterations_ < max_iter_ && !converged) {
    const bool changed = assign();
    ++iterations_;
    converged = !changed && totals_.empty() == 0;  // the centers are the means already
    if (!converged && update() <= limit) break;
  }
  if (!converged) assign();
  std::vector<double> squares = distances();
  for (int64_t i = 0; i < n_; ++i) squares[i] *= units_.weight(i);
  inertia_ = tree_sum(std::move(squares)) * weight_unit_;
}

// Moves the centers to the means of their clusters. Returns the sum of the squared moves.
double LloydAlgorithm::update() {
  const int64_t d = totals_.d;
  const Rounding& rounding = units_.rounding;
  std::optional<KMeansTotals> filled;
  if (totals_.empty() > 0) fill_empty(filled.emplace(totals_));
  const KMeansTotals& totals = filled ? *filled : totals_;
  std::vector<double> moves(k_);
  parallel_(k_, [&](int64_t lo, int64_t hi) {
    std::vector<double> mean(d);
    std::vector<char> old;  // the center before this update
    const Dense now{centers_.data(), centers_.wide(), k_, d};
    for (int64_t k = lo; k < hi; ++k) {
      if (totals.masses[k] == 0) continue;
      const double mass = static_cast<double>(totals.masses[k]) / units_.mass_scale;
      kmeans_kernel().mean(&totals.sums[k * d], d, rounding, mass, mean.data());
      if (spherical_ && !to_unit(mean.data(), d)) continue;
      old.assign(centers_.center(k), centers_.center(k + 1));
      centers_.set(k, mean.data());
      moves[k] = kmeans_kernel().distance(now, k, old.data());
    }
  });
  return tree_sum(moves);
}

// Fills empty clusters as update() in ops/kmeans/composed.py does. The first empty cluster takes the row that
// is farthest from its center, the second empty cluster takes the next row, and so on.
void LloydAlgorithm::fill_empty(KMeansTotals& totals) const {
  const std::vector<double> distances = far_distances(totals.empty());
  const int64_t spread = (int64_t{1} << ceil_log2(n_)) - 1;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n_; ++i) {
    if (distances[i] > 0 && units_.mass(i) > 0)
      keys.push_back((std::bit_cast<int64_t>(distances[i]) & ~spread) | (spread - i));
  }
  const int64_t fill = std::min(totals.empty(), static_cast<int64_t>(keys.size()));
  std::partial_sort(keys.begin(), keys.begin() + fill, keys.end(), std::greater<>());
  for (int64_t k = 0, next = 0; k < k_ && next < fill; ++k) {
    if (totals_.masses[k] != 0) continue;
    const int64_t row = spread - (keys[next++] & spread);
    move(totals, row, labels_[row], k);
  }
}

}  // namespace uefl::cpu
