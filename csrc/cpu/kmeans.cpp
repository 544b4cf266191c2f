#include "cpu/kmeans.h"

#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/features.h"
#include "cpu/kmeans_bounds.h"
#include "cpu/kmeans_lloyd.h"
#include "cpu/kmeans_problem.h"
#include "cpu/kmeans_step.h"
#include "cpu/kmeans_wide.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {
namespace {

// Measured constants that decide whether bounds on distances save time (docs/design/kmeans-cpu.md).
constexpr int64_t kSampleRows = 32;   // rows of the sample that decides about bounds
constexpr int64_t kLeastRows = 4096;  // with fewer rows the sample costs too much
constexpr int64_t kLeastRounds =
    16;  // with fewer iterations left, filling the bounds costs more time than they save
constexpr int64_t kBlockRows = 256;  // rows per block of the bounded search

// Lloyd's algorithm on dense rows.
class DenseLloyd : public LloydAlgorithm {
 public:
  DenseLloyd(const PreparedProblem& prepared, KMeansCenters centers, const KMeansOptions& options)
      : LloydAlgorithm(prepared.units(), prepared.weight_unit(), prepared.dense().n, std::move(centers),
                       options, prepared.parallel()),
        prepared_(prepared),
        dense_(prepared.dense()) {}

 private:
  bool assign() override;
  bool bounds_pay();
  std::vector<double> distances() const override { return prepared_.distances(centers_, labels_.data()); }
  std::vector<double> far_distances(int64_t) const override { return distances(); }
  void move(KMeansTotals& totals, int64_t row, int64_t from, int64_t to) const override {
    totals.move(dense_, row, units_, from, to);
  }

  const PreparedProblem& prepared_;
  const Dense& dense_;
  // The bounds of all rows, if they save time, and the bounds of the sample that decides whether they do.
  std::optional<KMeansBounds> bounds_, sample_;
  std::vector<int64_t> sample_labels_;
  int64_t one_in_ = 8;  // bounds save time if at most one distance in one_in_ is computed; with more of them,
                        // a search is faster
};

bool DenseLloyd::assign() {
  if (bounds_ || bounds_pay()) {
    const bool filled = bounds_.has_value();
    if (filled) {
      bounds_->follow(centers_, parallel_);
    } else {
      bounds_.emplace(dense_, 1, centers_, parallel_);
    }
    std::atomic<int64_t> scored = 0;
    const auto finder = [&]() -> FindLabels {
      return [&](const Dense&, int64_t first, int64_t last, int64_t* found) {
        scored += bounds_->assign(first, last, found - first);
      };
    };
    const bool changed = kmeans_step(rows_of(dense_), kBlockRows, finder, centers_.data(), units_, parallel_,
                                     labels_.data(), totals_, nullptr);
    if (filled && scored > dense_.n * k_ / one_in_) bounds_.reset(), one_in_ *= 2;
    return changed;
  }
  const Search search({centers_.data(), dense_.wide ? Dtype::f64 : Dtype::f32, 1, k_, dense_.d}, Metric::l2,
                      true, "kmeans", parallel_);
  return kmeans_step(rows_of(dense_), search, centers_.data(), units_, parallel_, labels_.data(), totals_,
                     nullptr);
}

// Returns true if the bounds of the previous iteration exclude most distances of the sample. With more
// centers than elements in a row, the bounds would take more memory than x in float32, and reading them would
// take half the time of a search.
bool DenseLloyd::bounds_pay() {
  if (KMeansBounds::width(k_) > dense_.d || dense_.n < kLeastRows || max_iter_ - iterations_ < kLeastRounds)
    return false;
  if (isa() >= Isa::avx512vnni && !on_every_shape()) return false;  // a full search is as fast here
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

}  // namespace

void kmeans(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel) {
  const PreparedProblem prepared(problem, options, parallel);
  const Dense& dense = prepared.dense();
  double lowest = std::numeric_limits<double>::infinity();
  for (int64_t restart = 0; restart < options.n_init; ++restart) {
    KMeansCenters centers =
        options.seeding == Seeding::given
            ? given_centers(problem.init, problem.k, dense.d, dense.wide, options.spherical)
            : prepared.seeds(options.seeding, problem.k, problem.seed, restart);
    std::unique_ptr<LloydAlgorithm> lloyd;
    if (distances_pay(dense, problem.k)) {
      lloyd = std::make_unique<WideLloyd>(prepared, std::move(centers), options);
    } else {
      lloyd = std::make_unique<DenseLloyd>(prepared, std::move(centers), options);
    }
    lloyd->run(prepared.variance() * options.tol);
    if (restart == 0 || lloyd->inertia() < lowest) {
      lowest = lloyd->inertia();
      lloyd->write(problem.result);
    }
  }
}

}  // namespace uefl::cpu
