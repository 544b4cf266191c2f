// The values of a k-means problem that do not change during a fit, like Problem in ops/kmeans/composed.py.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/kmeans.h"
#include "cpu/kmeans_seeding.h"
#include "cpu/kmeans_step.h"
#include "cpu/large_vector.h"

namespace uefl::cpu {

// Returns the squared norm, like square_norms() in ops/kmeans_step/composed.py.
double square_norm(const double* values, int64_t d);

// Scales a row to length 1. Returns false and changes nothing if the row is zero.
bool to_unit(double* values, int64_t d);

// k centers [k, d] in the dtype of the rows: float64 if wide, otherwise float32.
class KMeansCenters {
 public:
  KMeansCenters(int64_t k, int64_t d, bool wide) : k_(k), d_(d), size_(wide ? 8 : 4), data_(k * d * size_) {}

  const char* data() const { return data_.data(); }
  const char* center(int64_t k) const { return data() + k * d_ * size_; }
  int64_t dim() const { return d_; }
  bool wide() const { return size_ == 8; }
  int64_t count() const { return k_; }
  int64_t bytes() const { return k_ * d_ * size_; }

  // Writes a center, or all of them, in float64.
  void widen(int64_t k, double* values) const { widen(k, k + 1, values); }
  void widen(double* values) const { widen(0, k_, values); }
  // Rounds values [d] to the dtype of the rows, and makes them a center.
  void set(int64_t k, const double* values);
  // Replaces all centers by `rows` [k, d], in the dtype of the rows.
  void set(const void* rows) { std::memcpy(data_.data(), rows, bytes()); }

 private:
  void widen(int64_t first, int64_t last, double* values) const;

  int64_t k_, d_, size_;  // size_: bytes of an element
  LargeVector<char> data_;
};

// Returns the given centers [k, d], which are float64 if wide, otherwise float32. Throws std::runtime_error
// if one is not finite or exceeds kLargest.
KMeansCenters given_centers(const void* init, int64_t k, int64_t d, bool wide, bool spherical);

// grid_bits returns the bits of an element on the grid of the seeding, without the sign. grid_scale returns
// the number of steps of this grid in a unit.
int64_t grid_bits(int64_t n, int64_t d);
double grid_scale(const KMeansScales& scales, int64_t n, int64_t bits);

// Returns the mean variance of the columns of n rows from their sums and sums of squares on a grid of this
// scale.
double mean_variance(const std::vector<int64_t>& sums, const std::vector<int64_t>& squares, int64_t n,
                     double scale);

class PreparedProblem {
 public:
  PreparedProblem(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel);

  const Dense& dense() const { return dense_; }
  const Parallel& parallel() const { return parallel_; }
  KMeansUnits units() const { return units_of(scales_, weights_); }
  double weight_unit() const { return scales_.weight_unit; }
  double variance() const { return variance_; }

  KMeansCenters seeds(Seeding seeding, int64_t k, uint64_t seed, int64_t restart) const;
  // Returns the squared distances of the rows to their centers.
  std::vector<double> distances(const KMeansCenters& centers, const int64_t* labels) const;

 private:
  void make_dense(const StridedRows& x, bool spherical);
  void make_seeder(int64_t bits, double scale, bool keep);
  // Calls work(lo, hi) in parallel for portions of the rows.
  template <class Body>
  void for_rows(const Body& work) const;

  const Parallel& parallel_;
  const KMeansKernel& kernel_ = kmeans_kernel();
  LargeVector<double> copy_;  // a copy of x, if x is not dense
  Dense dense_;
  KMeansScales scales_;
  std::vector<double> weights_;  // at most 1, or empty
  double variance_ = 0;
  std::unique_ptr<Seeder> seeder_;
};

}  // namespace uefl::cpu
