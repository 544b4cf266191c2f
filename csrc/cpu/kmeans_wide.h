// Lloyd's algorithm on wide rows with few clusters. A search would pack the centers, which takes as long as
// comparing some tens of rows. An iteration computes all squared distances instead, in the dtype of the rows.
//
// A sum of d rounded squares of differences has a relative error that the number of additions bounds, apart
// from overflow and underflow (kmeans_kernel.h). So the nearest center is the winner of the definition
// (vq_assign.h) if the second distance is larger by more than the errors of both sums, for both centers. For
// the other rows, the distances are computed in float64. A search decides the rows that are still not
// certain.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kmeans_lloyd.h"
#include "cpu/kmeans_problem.h"

namespace uefl::cpu {

// Returns true if such an iteration takes less time than a search.
bool distances_pay(const Dense& x, int64_t k);

class WideLloyd : public LloydAlgorithm {
 public:
  WideLloyd(const PreparedProblem& prepared, KMeansCenters centers, const KMeansOptions& options);

 private:
  bool assign() override;
  std::vector<double> distances() const override { return prepared_.distances(centers_, labels_.data()); }
  std::vector<double> far_distances(int64_t) const override { return distances(); }
  void move(KMeansTotals& totals, int64_t row, int64_t from, int64_t to) const override {
    totals.move(dense_, row, units_, from, to);
  }
  std::vector<int64_t> nearest() const;
  void decide(const std::vector<char>& certain, std::vector<int64_t>& found) const;
  void add_moves(const std::vector<int64_t>& rows, const std::vector<int64_t>& found);

  const PreparedProblem& prepared_;
  const Dense& dense_;
};

}  // namespace uefl::cpu
