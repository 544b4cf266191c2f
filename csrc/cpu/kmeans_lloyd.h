// Lloyd's algorithm from given centers, for rows of any kind. A derived class for the kind of rows finds the
// labels.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kmeans.h"
#include "cpu/kmeans_problem.h"
#include "cpu/kmeans_step.h"

namespace uefl::cpu {

class LloydAlgorithm {
 public:
  virtual ~LloydAlgorithm() = default;

  // Iterates until the sum of the squared moves of the centers is at most `limit`, no label changes, or
  // max_iter iterations are done.
  void run(double limit);

  double inertia() const { return inertia_; }
  void write(const KMeansResult& result) const;

 protected:
  LloydAlgorithm(const KMeansUnits& units, double weight_unit, int64_t n, KMeansCenters centers,
                 const KMeansOptions& options, const Parallel& parallel);

  // Gives each row the label of its nearest center and updates the totals. Returns true if a label changed.
  virtual bool assign() = 0;
  // Returns the squared distance of each row to its center, after assign().
  virtual std::vector<double> distances() const = 0;
  // Returns the distances from which the rows for empty clusters are chosen, with the same bits as
  // square_norms() in ops/kmeans_step/composed.py. Only the `count` farthest rows with a mass need their
  // distance. Other rows may have zero.
  virtual std::vector<double> far_distances(int64_t count) const = 0;
  // Moves one row in the totals.
  virtual void move(KMeansTotals& totals, int64_t row, int64_t from, int64_t to) const = 0;

  const KMeansUnits units_;
  const double weight_unit_;
  const int64_t n_, k_;
  const bool spherical_;
  const int64_t max_iter_;
  const Parallel& parallel_;
  KMeansCenters centers_;
  KMeansTotals totals_;  // of labels_
  std::vector<int64_t> labels_;
  int64_t iterations_ = 0;

 private:
  double update();
  void fill_empty(KMeansTotals& totals) const;

  double inertia_ = 0;
};

}  // namespace uefl::cpu
