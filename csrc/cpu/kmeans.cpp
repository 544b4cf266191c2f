#include "cpu/kmeans.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "cpu/features.h"
#include "cpu/kmeans_bounds.h"
#include "cpu/kmeans_problem.h"
#include "cpu/kmeans_step.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {
namespace {

// When it pays to keep bounds on distances: measured constants (docs/design/kmeans-cpu.md).
constexpr int64_t kSampleRows = 32;   // rows of the sample that decides about bounds
constexpr int64_t kLeastRows = 4096;  // with fewer rows the sample costs too much
constexpr int64_t kLeastRounds = 16;  // with fewer iterations left, filling the bounds does not pay
constexpr int64_t kBlockRows = 256;   // rows per block of the bounded search

// One run of Lloyd's algorithm from given centers.
class Lloyd {
 public:
  Lloyd(const PreparedProblem& prepared, KMeansCenters centers, const KMeansOptions& options)
      : prepared_(prepared),
        dense_(prepared.dense()),
        units_(prepared.units()),
        k_(centers.count()),
        spherical_(options.spherical),
        max_iter_(options.max_iter),
        centers_(std::move(centers)),
        totals_(k_, dense_.d),
        labels_(dense_.n, -1) {}

  void run(double limit);

  double inertia() const { return inertia_; }
  void write(const KMeansProblem& problem) const {
    std::memcpy(problem.centers, centers_.data(), centers_.bytes());
    std::copy(labels_.begin(), labels_.end(), problem.labels);
    *problem.inertia = inertia_;
    *problem.iterations = iterations_;
  }

 private:
  bool assign();
  bool bounds_pay();
  double update();
  void fill_empty(KMeansTotals& totals) const;

  const PreparedProblem& prepared_;
  const Dense& dense_;
  const KMeansUnits units_;
  const int64_t k_;
  const bool spherical_;
  const int64_t max_iter_;
  KMeansCenters centers_;
  KMeansTotals totals_;  // of labels_
  std::vector<int64_t> labels_;
  // Bounds of all rows, if they pay, and bounds of the sample that decides.
  std::optional<KMeansBounds> bounds_, sample_;
  std::vector<int64_t> sample_labels_;
  int64_t one_in_ = 8;  // bounds pay while at most one distance in one_in_ has to be computed: a search
                        // is faster than more single distances
  double inertia_ = 0;
  int64_t iterations_ = 0;
};

void Lloyd::run(double limit) {
  bool converged = false;  // labels_ are the nearest of the present centers
  while (iterations_ < max_iter_ && !converged) {
    const bool changed = assign();
    ++iterations_;
    const bool empty = totals_.empty() > 0;
    const double shift = update();
    converged = !changed && !empty;
    if (!converged && shift <= limit) break;
  }
  if (!converged) assign();
  std::vector<double> distances = prepared_.distances(centers_, labels_.data());
  for (int64_t i = 0; i < dense_.n; ++i) distances[i] *= units_.weight(i);
  inertia_ = tree_sum(std::move(distances)) * prepared_.weight_unit();
}

// Gives each row the label of its nearest center and updates the totals. Returns whether a label changed.
bool Lloyd::assign() {
  const Parallel& parallel = prepared_.parallel();
  if (bounds_ || bounds_pay()) {
    const bool filled = bounds_.has_value();
    if (filled) {
      bounds_->follow(centers_, parallel);
    } else {
      bounds_.emplace(dense_, 1, centers_, parallel);
    }
    std::atomic<int64_t> scored = 0;
    const auto finder = [&]() -> FindLabels {
      return [&](const Dense&, int64_t first, int64_t last, int64_t* found) {
        scored += bounds_->assign(first, last, found - first);
      };
    };
    const bool changed = kmeans_step(rows_of(dense_), kBlockRows, finder, centers_.data(), units_, parallel,
                                     labels_.data(), totals_, nullptr);
    if (filled && scored > dense_.n * k_ / one_in_) bounds_.reset(), one_in_ *= 2;
    return changed;
  }
  const Search search({centers_.data(), dense_.wide ? Dtype::f64 : Dtype::f32, 1, k_, dense_.d}, Metric::l2,
                      true, "kmeans", parallel);
  return kmeans_step(rows_of(dense_), search, centers_.data(), units_, parallel, labels_.data(), totals_,
                     nullptr);
}

// Returns whether bounds of the previous iteration rule out most distances of the sample. With more centers
// than elements in a row, the bounds would take more memory than x in float32, and reading them would take
// half the time of a search.
bool Lloyd::bounds_pay() {
  if (KMeansBounds::width(k_) > dense_.d || dense_.n < kLeastRows || max_iter_ - iterations_ < kLeastRounds)
    return false;
  if (isa() >= Isa::avx512vnni && !on_every_shape()) return false;  // the search is as fast here
  bool pay = false;
  if (sample_) {
    sample_->follow(centers_, on_this_thread);
    pay = sample_->assign(0, sample_->rows(), sample_labels_.data()) <= sample_->rows() * k_ / one_in_;
  }
  sample_.reset();
  if (pay) return true;
  sample_.emplace(dense_, dense_.n / kSampleRows, centers_, on_this_thread);
  sample_labels_.assign(sample_->rows(), 0);
  sample_->assign(0, sample_->rows(), sample_labels_.data());
  return false;
}

// Moves the centers to the means of their clusters; returns the sum of the squared moves.
double Lloyd::update() {
  const int64_t d = dense_.d;
  const Rounding& rounding = units_.rounding;
  std::optional<KMeansTotals> filled;
  if (totals_.empty() > 0) fill_empty(filled.emplace(totals_));
  const KMeansTotals& totals = filled ? *filled : totals_;
  std::vector<double> moves(k_);
  prepared_.parallel()(k_, [&](int64_t lo, int64_t hi) {
    std::vector<double> mean(d), before(d);
    for (int64_t k = lo; k < hi; ++k) {
      if (totals.masses[k] == 0) continue;
      const double mass = static_cast<double>(totals.masses[k]) / units_.mass_scale;
      for (int64_t j = 0; j < d; ++j) {
        mean[j] = rounding.middle[j] + static_cast<double>(totals.sums[k * d + j]) / rounding.scale[j] / mass;
      }
      if (spherical_ && !to_unit(mean.data(), d)) continue;
      std::copy_n(centers_.exact(k), d, before.begin());
      centers_.set(k, mean.data());
      for (int64_t j = 0; j < d; ++j) mean[j] = centers_.exact(k)[j] - before[j];
      moves[k] = square_norm(mean.data(), d);
    }
  });
  return tree_sum(moves);
}

// The first empty cluster takes the row that is farthest from its center, the second empty cluster takes the
// next row, and so on, as update() of the reference does.
void Lloyd::fill_empty(KMeansTotals& totals) const {
  const std::vector<double> distances = prepared_.distances(centers_, labels_.data());
  const int64_t n = dense_.n, spread = (int64_t{1} << ceil_log2(n)) - 1;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) {
    if (distances[i] > 0 && units_.mass(i) > 0)
      keys.push_back((std::bit_cast<int64_t>(distances[i]) & ~spread) | (spread - i));
  }
  const int64_t fill = std::min(totals.empty(), static_cast<int64_t>(keys.size()));
  std::partial_sort(keys.begin(), keys.begin() + fill, keys.end(), std::greater<>());
  for (int64_t k = 0, next = 0; k < k_ && next < fill; ++k) {
    if (totals_.masses[k] != 0) continue;
    const int64_t row = spread - (keys[next++] & spread);
    totals.move(dense_, row, units_, labels_[row], k);
  }
}

}  // namespace

void kmeans(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel) {
  const PreparedProblem prepared(problem, options, parallel);
  double lowest = std::numeric_limits<double>::infinity();
  for (int64_t restart = 0; restart < options.n_init; ++restart) {
    Lloyd lloyd(prepared,
                options.seeding == Seeding::given
                    ? prepared.given(problem.init, problem.k, options.spherical)
                    : prepared.seeds(options.seeding, problem.k, problem.seed, restart),
                options);
    lloyd.run(prepared.variance() * options.tol);
    if (restart == 0 || lloyd.inertia() < lowest) {
      lowest = lloyd.inertia();
      lloyd.write(problem);
    }
  }
}

}  // namespace uefl::cpu
