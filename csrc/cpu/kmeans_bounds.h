// Lloyd's algorithm without most of its distances. It uses the lower bounds of Elkan (2003), one for each row
// and center, on scores instead of distances. Let y = x - mean and b = c - mean. Then |x - c|^2 / 2 = |y|^2 /
// 2 + |b|^2 / 2 - y.b, and the first term is the same for all centers. A center that has moved by p since y.b
// was computed changes y.b by at most |y| p. So with the stored values,
//   reach = -y.b + |y| way,   score = |b|^2 / 2 - y.b >= |b|^2 / 2 + reach - |y| way   at all later times,
// and a moving center changes no stored value of a row. A row keeps its label while the score of its own
// center is below all these bounds by more than the rounding error (common/certificate.h). Otherwise the
// remaining centers are scored in float32, and the nearest one is found as in vq_assign.h. So the labels
// equal the labels of a full search.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kmeans_kernel.h"
#include "cpu/kmeans_problem.h"

namespace uefl::cpu {

class KMeansBounds {
 public:
  // Prepares bounds for rows 0, stride, 2 stride ... of x. It computes no bounds yet.
  KMeansBounds(const Dense& x, int64_t stride, const KMeansCenters& centers, const Parallel& parallel);

  // Sets the current centers.
  void follow(const KMeansCenters& centers, const Parallel& parallel);

  // Updates the labels of rows [first, last). Returns the number of centers that were scored. Thread-safe for
  // disjoint rows.
  int64_t assign(int64_t first, int64_t last, int64_t* labels);

  int64_t rows() const { return rows_; }

  // Returns the number of floats stored per row.
  static int64_t width(int64_t k) { return (k + 63) / 64 * 64; }

 private:
  int64_t nearest(int64_t row, const int32_t* codes, const float* scores, int64_t count) const;

  const KMeansKernel& kernel_ = kmeans_kernel();
  const Dense x_;
  const int64_t stride_, rows_, k_, d_;
  const int64_t pitch_, width_;            // floats of a center, and of the bounds of a row
  std::vector<double> centers_;            // [k, d]
  std::vector<float> mean_;                // [d]
  std::vector<float> centered_;            // centers minus the mean, [k, pitch]
  std::vector<double> ways_;               // distance that each center has moved, [k]
  std::vector<float> way_, half_squares_;  // [width]; half squares are padded with infinity
  double most_square_ = 0;                 // the largest |b|^2 so far
  double error_ = 0, slack_ = 0;           // error of a comparison of two scores, and of a score with a bound
  std::vector<float> norms_;               // |y|, rounded up
  double most_norm_ = 0;
  std::unique_ptr<float[]> reach_;  // [rows, width]; infinity for the center of the row
  std::vector<float> own_;          // -y.b - |y| way of the own center, for an upper bound
};

}  // namespace uefl::cpu
