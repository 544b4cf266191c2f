// Lloyd's algorithm without most of its distances: Elkan's lower bounds (2003), one for each row and centre,
// on scores instead of distances. With y = x - mean and b = c - mean, |x - c|^2 / 2 = |y|^2 / 2 + |b|^2 / 2 -
// y.b, whose first term is the same for all centres. A centre that has gone a way p since y.b was computed
// changes it by at most |y| p. So with what is kept,
//   reach = -y.b + |y| way,   score = |b|^2 / 2 - y.b >= |b|^2 / 2 + reach - |y| way   at all later times,
// and a centre that moves changes nothing that is kept for a row. A row keeps its label while the score of
// its own centre is below all these bounds by more than rounding explains (common/certificate.h); else the
// centres that are not ruled out are scored, in float32, and the nearest is found as in vq_assign.h. So
// labels are those of a search.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kmeans_kernel.h"
#include "cpu/kmeans_problem.h"

namespace uefl::cpu {

class KMeansBounds {
 public:
  // For rows 0, stride, 2 stride ... of x, of which nothing is known yet.
  KMeansBounds(const Dense& x, int64_t stride, const KMeansCentres& centres, const Parallel& parallel);

  // Takes the centres as they are now.
  void follow(const KMeansCentres& centres, const Parallel& parallel);

  // Labels of rows [first, last) of those given: before and after. Returns how many centres were scored.
  // Several threads may do so, each for rows of its own.
  int64_t assign(int64_t first, int64_t last, int64_t* labels);

  int64_t rows() const { return rows_; }

  // Floats that are kept for a row.
  static int64_t width(int64_t k) { return (k + 63) / 64 * 64; }

 private:
  int64_t nearest(int64_t row, const int32_t* codes, const float* scores, int64_t count) const;

  const KMeansKernel& kernel_ = kmeans_kernel();
  const Dense x_;
  const int64_t stride_, rows_, k_, d_;
  const int64_t pitch_, width_;            // floats of a centre, and of the bounds of a row
  std::vector<double> centres_;            // [k, d]
  std::vector<float> mean_;                // [d]
  std::vector<float> codes_;               // centres less the mean, [k, pitch]
  std::vector<double> ways_;               // that the centres have gone, [k]
  std::vector<float> way_, half_squares_;  // [width]; half squares are filled up with infinity
  double most_square_ = 0;                 // |b|^2 of the longest so far
  double error_ = 0, slack_ = 0;           // of a comparison of scores, and of one with a bound
  std::vector<float> norms_;               // |y|, or a little more
  double most_norm_ = 0;
  std::unique_ptr<float[]> reach_;  // [rows, width]; infinity for the centre of the row
  std::vector<float> own_;          // of that one -y.b - |y| way, for a bound from above
};

}  // namespace uefl::cpu
