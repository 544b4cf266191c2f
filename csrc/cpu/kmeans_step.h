// One step of Lloyd's algorithm on the CPU, which reads the rows once: labels, sums, masses and distances,
// bit for bit as ops/kmeans_step/reference.py defines them.
//
// Sums are integers, so the order of the rows and the number of threads do not matter. A later step touches
// only rows with a changed label: it subtracts exactly the numbers that the row added to its old cluster.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/kmeans_kernel.h"
#include "cpu/large_vector.h"
#include "cpu/strided_rows.h"
#include "cpu/threads.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {

inline int64_t ceil_log2(int64_t n) { return n > 1 ? 64 - __builtin_clzll(static_cast<uint64_t>(n - 1)) : 0; }

// Returns the bits of an integer for which n such integers sum to at most 2^62.
inline int64_t mass_bits(int64_t n) { return 62 - ceil_log2(n); }

// Returns the rounding of elements that become integers of at most mass_scale. Elements beyond the extremes
// of the columns, which the caller must not pass, may be eight times as large.
inline Rounding rounding_of(const double* middle, const double* scale, double mass_scale) {
  return {middle, scale, mass_scale <= 0x1p48};
}

// Returns 2^e for e from -1022 to 1023.
inline double power_of_two(int64_t e) { return std::bit_cast<double>((e + 1023) << 52); }

// Returns the least power of two that is not below a value, and at least 2^-900.
double least_power_of_two(double value);

// Returns the sum by halves: it adds value i and value i + half, where half is a power of two.
double tree_sum(std::vector<double> values);

inline StridedRows rows_of(const Dense& x) {
  return {x.data, x.wide ? Dtype::f64 : Dtype::f32, x.n, 1, x.d, x.d, 0, 1};
}

// Rows without gaps, in float64 for float64 x and in float32 for other dtypes. They stay in place if
// possible. Otherwise some rows at a time are copied.
class DenseRows {
 public:
  explicit DenseRows(const StridedRows& x);

  bool in_place() const { return in_place_; }
  // Returns rows [lo, hi) of x. The next call reuses the memory of a copy.
  Dense read(int64_t lo, int64_t hi);

 private:
  const StridedRows x_;
  const bool wide_, in_place_;
  std::vector<double> memory_;
};

// The result of units() in ops/kmeans_step/composed.py: middle [d], scale [d], and the numbers.
struct KMeansScales {
  std::vector<double> middle, scale;
  double mass_scale, weight_unit;
};

// Calls work(part, column, lo, hi) in parallel for portions of the rows, or of the columns if there are few
// rows. `part` has some columns of x, from `column` on.
using PartWork = std::function<void(const Dense& part, int64_t column, int64_t lo, int64_t hi)>;
void for_parts(const Dense& x, const Parallel& parallel, const PartWork& work);

// Computes the scales. weights are [n] or null. Throws std::runtime_error with the name of the op if x or the
// weights are not finite or too large, or if weights are negative or all zero.
KMeansScales kmeans_scales(const StridedRows& x, const double* weights, const Parallel& parallel,
                           const std::string& op);

// Computes the scales from the extremes of the columns, [d], of finite rows.
KMeansScales scales_within(int64_t n, std::vector<double> low, std::vector<double> high,
                           const double* weights, const std::string& op);

// A row adds round((x - middle) * weight * scale) to the sums of its cluster and round(weight * mass_scale)
// to its mass.
struct KMeansUnits {
  Rounding rounding;
  const double* weights;  // [n], at most 1, or null for ones
  double mass_scale;

  double weight(int64_t row) const { return weights ? weights[row] : 1; }
  int64_t mass(int64_t row) const { return static_cast<int64_t>(__builtin_rint(weight(row) * mass_scale)); }
};

// Returns the units of a problem with these weights, which may be empty.
inline KMeansUnits units_of(const KMeansScales& scales, const std::vector<double>& weights) {
  return {rounding_of(scales.middle.data(), scales.scale.data(), scales.mass_scale),
          weights.empty() ? nullptr : weights.data(), scales.mass_scale};
}

struct KMeansTotals {
  KMeansTotals(int64_t k, int64_t d) : d(d), sums(k * d), masses(k) {}

  // Adds rows to a cluster.
  void add(const Dense& x, const int64_t* rows, int64_t count, const KMeansUnits& units, int64_t to);
  void move(const Dense& x, int64_t row, const KMeansUnits& units, int64_t from, int64_t to);
  int64_t empty() const { return std::count(masses.begin(), masses.end(), 0); }

  int64_t d;
  LargeVector<int64_t> sums;    // [k, d]
  std::vector<int64_t> masses;  // [k]
};

// Updates the labels of rows [first, last) of x, in the layout of DenseRows. labels[0] belongs to row
// `first`.
using FindLabels = std::function<void(const Dense& x, int64_t first, int64_t last, int64_t* labels)>;

// Gives each row of x [n, d] its label, and moves it in the totals from its old label (-1: none). Each thread
// has a finder, which labels `block_rows` rows together. centers [k, d] have the dtype of DenseRows.
// distances [n] are squared; they may be null. Returns true if a label changed.
bool kmeans_step(const StridedRows& x, int64_t block_rows, const std::function<FindLabels()>& finder,
                 const void* centers, const KMeansUnits& units, const Parallel& parallel, int64_t* labels,
                 KMeansTotals& totals, double* distances);
// Moves each row as above, with labels from a search.
bool kmeans_step(const StridedRows& x, const Search& search, const void* centers, const KMeansUnits& units,
                 const Parallel& parallel, int64_t* labels, KMeansTotals& totals, double* distances);

const KMeansKernel& kmeans_kernel();

}  // namespace uefl::cpu
