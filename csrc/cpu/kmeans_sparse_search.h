// Finds the nearest of the centers for sparse rows, exactly: the argmin of the float64 distance of the dense
// rows.
//
// Scores |c|^2 / 2 - x.c in float64 read only the non-zeros. The definition (vq_assign.h) sums d rounded
// squares. Both are within E of their real values,
//   E = 1.01 (d + 8) 2^-53 (|x| G + G^2 / 2 + (|x| + G)^2 / 2) + 2^-1000,   G = max |c|,
// where the last term covers underflow. If second - best > 2 E, the best center is the winner of the
// definition. Otherwise the definition decides among the centers within 2 E of the best. An element that is
// zero in the row and in the center adds nothing to it, so it reads only the non-zeros of both.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/cache_line.h"
#include "cpu/kmeans_sparse_kernel.h"
#include "cpu/threads.h"

namespace uefl::cpu {

// CSR rows [n, d]. The columns of a row ascend and do not repeat. Zeros among the values are allowed.
struct SparseRows {
  const void* values;  // float64 if wide, otherwise float32
  bool wide;
  const int32_t* columns;
  const int64_t* offsets;  // [n + 1]
  int64_t n, d;

  SparseRow row(int64_t i) const {
    return {static_cast<const char*>(values) + offsets[i] * (wide ? 8 : 4), columns + offsets[i],
            offsets[i + 1] - offsets[i], wide};
  }
  double value(int64_t i) const {
    return wide ? static_cast<const double*>(values)[i] : static_cast<const float*>(values)[i];
  }
};

const KMeansSparseKernel& kmeans_sparse_kernel();

// Returns true if the offsets ascend from 0 to the number of columns, and the columns of each row from at
// least 0 to below d. Nothing outside of the arrays is read.
bool in_order(const SparseRows& x, int64_t columns, const Parallel& parallel);

// Returns |x|^2 of each row. Throws std::runtime_error with the name of the op if a value is not finite or
// exceeds kLargest.
std::vector<double> sparse_squares(const SparseRows& x, const Parallel& parallel, const char* op);

// Centers [k, d], transposed and padded with zeros to [d, pitch].
class CenterColumns {
 public:
  CenterColumns(const double* centers, int64_t k, int64_t d, const Parallel& parallel);

  int64_t pitch() const { return pitch_; }
  // Computes the products [pitch] of a row and the centers.
  void products(const SparseRow& row, double* out) const {
    kernel_.products(row, reinterpret_cast<const double*>(lines_.get()), pitch_, out);
  }

 private:
  const KMeansSparseKernel& kernel_ = kmeans_sparse_kernel();
  const int64_t pitch_;
  const std::unique_ptr<CacheLine[]> lines_;
};

class SparseSearch {
 public:
  // centers [k, d] and x must outlive the search.
  SparseSearch(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel);

  // Returns the memory of one thread for products.
  std::vector<double> scratch() const { return std::vector<double>(columns_.pitch()); }

  // Returns the nearest center of a row with this |x|^2, and its squared distance up to rounding.
  int64_t nearest(int64_t row, double square, double* products, double& distance) const;
  // Computes the distances of a row to all centers, not squared.
  template <class T>
  void distances(int64_t row, double square, double* products, T* out) const;
  // Returns the squared distance to one center, with the bits of square_norms.
  double distance(int64_t row, int64_t k) const;
  // Returns a bound on the error of a score, and of half a squared distance that is computed from products.
  double error(double square) const;

 private:
  // The columns of a center that are not zero. They are found on first use.
  struct Support {
    std::once_flag once;
    std::vector<int32_t> columns;
  };

  double definition(int64_t row, int64_t k) const;
  double from_products(double square, const double* products, int64_t k) const;
  template <class Add>
  void for_differences(int64_t row, int64_t k, const Add& add) const;
  void drop_duplicates();

  const SparseRows& x_;
  const double* centers_;
  const int64_t k_;
  const CenterColumns columns_;
  std::vector<double> norms_, half_norms_;  // [k] and [pitch]; infinity in the padding
  double radius_;
  const std::unique_ptr<Support[]> supports_;
};

}  // namespace uefl::cpu
