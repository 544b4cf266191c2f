#include "cpu/kmeans_sparse.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cpu/kmeans_lloyd.h"
#include "cpu/kmeans_step.h"

namespace uefl::cpu {
namespace {

constexpr char kOp[] = "kmeans";  // the op in error messages
constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t nearest_integer(double value) { return __builtin_llrint(value); }

// The values that do not change during a fit.
struct SparseProblem {
  SparseProblem(const SparseRows& x, const double* given_weights, bool with_variance,
                const Parallel& parallel);

  const SparseRows& x;
  std::vector<double> squares;  // |x|^2, [n]
  KMeansScales scales;
  std::vector<double> weights;  // at most 1, or empty
  double variance = 0;          // the mean variance of the columns

 private:
  void find_variance();
};

SparseProblem::SparseProblem(const SparseRows& x, const double* given_weights, bool with_variance,
                             const Parallel& parallel)
    : x(x), squares(sparse_squares(x, parallel, kOp)) {
  std::vector<int64_t> count(x.d);
  std::vector<double> low(x.d, kInfinity), high(x.d, -kInfinity);
  for (int64_t i = x.offsets[0]; i < x.offsets[x.n]; ++i) {
    const int32_t j = x.columns[i];
    const double value = x.value(i);
    ++count[j];
    low[j] = std::min(low[j], value), high[j] = std::max(high[j], value);
  }
  for (int64_t j = 0; j < x.d; ++j) {
    if (count[j] < x.n) low[j] = std::min(low[j], 0.0), high[j] = std::max(high[j], 0.0);
  }
  scales = scales_within(x.n, std::move(low), std::move(high), given_weights, kOp);
  if (given_weights) {
    weights.resize(x.n);
    std::transform(given_weights, given_weights + x.n, weights.begin(),
                   [&](double weight) { return weight / scales.weight_unit; });
  }
  if (with_variance) find_variance();
}

// Computes the variance on the grid of the seeding, as for dense rows.
void SparseProblem::find_variance() {
  const double scale = grid_scale(scales, x.n, grid_bits(x.n, x.d));
  std::vector<int64_t> zero(x.d), sums(x.d), squares(x.d);
  for (int64_t j = 0; j < x.d; ++j) {
    zero[j] = nearest_integer(-scales.middle[j] * scale);
    sums[j] = zero[j] * x.n, squares[j] = zero[j] * zero[j] * x.n;
  }
  for (int64_t i = x.offsets[0]; i < x.offsets[x.n]; ++i) {
    const int32_t j = x.columns[i];
    const int64_t value = nearest_integer((x.value(i) - scales.middle[j]) * scale);
    sums[j] += value - zero[j], squares[j] += value * value - zero[j] * zero[j];
  }
  variance = mean_variance(sums, squares, x.n, scale);
}

class SparseLloyd : public LloydAlgorithm {
 public:
  SparseLloyd(const SparseProblem& problem, KMeansCenters centers, const KMeansOptions& options,
              const Parallel& parallel);

 private:
  struct Move {
    int64_t row, from, to;
  };

  bool assign() override;
  std::vector<double> distances() const override { return squares_; }
  std::vector<double> far_distances(int64_t count) const override;
  void move(KMeansTotals& totals, int64_t row, int64_t from, int64_t to) const override;
  void add_moves(const std::vector<Move>& moves, const std::vector<int64_t>& masses_before);
  int64_t units_of_zeros(int64_t mass, int64_t column) const;

  const SparseProblem& problem_;
  const SparseRows& x_;
  std::vector<double> zero_;         // the amount that a zero of weight 1 adds to its column, not rounded
  std::vector<int64_t> zero_units_;  // the same, rounded
  std::vector<double> squares_;      // distances to the centers
  LargeVector<double> exact_;        // the centers of the last assign(), in float64
};

SparseLloyd::SparseLloyd(const SparseProblem& problem, KMeansCenters centers, const KMeansOptions& options,
                         const Parallel& parallel)
    : LloydAlgorithm(units_of(problem.scales, problem.weights), problem.scales.weight_unit, problem.x.n,
                     std::move(centers), options, parallel),
      problem_(problem),
      x_(problem.x),
      zero_(x_.d),
      zero_units_(x_.d),
      squares_(x_.n),
      exact_(k_ * x_.d) {
  for (int64_t j = 0; j < x_.d; ++j) {
    zero_[j] = -units_.rounding.middle[j] * units_.rounding.scale[j];
    zero_units_[j] = nearest_integer(zero_[j]);
  }
}

bool SparseLloyd::assign() {
  centers_.widen(exact_.data());
  const SparseSearch search(x_, exact_.data(), k_, parallel_);
  std::vector<int64_t> found(n_);
  parallel_(n_, [&](int64_t lo, int64_t hi) {
    std::vector<double> products = search.scratch();
    for (int64_t i = lo; i < hi; ++i)
      found[i] = search.nearest(i, problem_.squares[i], products.data(), squares_[i]);
  });
  const std::vector<int64_t> masses_before = totals_.masses;
  std::vector<Move> moves;
  for (int64_t i = 0; i < n_; ++i) {
    if (found[i] == labels_[i]) continue;
    moves.push_back({i, labels_[i], found[i]});
    totals_.masses[found[i]] += units_.mass(i);
    if (labels_[i] >= 0) totals_.masses[labels_[i]] -= units_.mass(i);
  }
  labels_ = std::move(found);
  add_moves(moves, masses_before);
  return !moves.empty();
}

// Moves rows in the sums. A thread takes some of the clusters, so that no two threads add to the same sum.
void SparseLloyd::add_moves(const std::vector<Move>& moves, const std::vector<int64_t>& masses_before) {
  if (moves.empty()) return;
  const int64_t d = x_.d;
  const Rounding& rounding = units_.rounding;
  parallel_(k_, [&](int64_t lo, int64_t hi) {
    const auto inside = [&](int64_t k) { return lo <= k && k < hi; };
    for (const Move& move : moves) {
      int64_t* to = inside(move.to) ? &totals_.sums[move.to * d] : nullptr;
      int64_t* from = inside(move.from) ? &totals_.sums[move.from * d] : nullptr;
      if (!to && !from) continue;
      const double weight = units_.weight(move.row);
      for (int64_t i = x_.offsets[move.row]; i < x_.offsets[move.row + 1]; ++i) {
        const int32_t j = x_.columns[i];
        const double value = (x_.value(i) - rounding.middle[j]) * weight * rounding.scale[j];
        const int64_t units =
            nearest_integer(value) - (units_.weights
                                          ? nearest_integer(-rounding.middle[j] * weight * rounding.scale[j])
                                          : zero_units_[j]);
        if (to) to[j] += units;
        if (from) from[j] -= units;
      }
    }
    for (int64_t k = lo; k < hi; ++k) {
      const int64_t before = masses_before[k], now = totals_.masses[k];
      if (now == before) continue;
      for (int64_t j = 0; j < d; ++j)
        totals_.sums[k * d + j] += units_of_zeros(now, j) - units_of_zeros(before, j);
    }
  });
}

// Returns the sum of a column over rows of zeros that have this mass together. With weights, the sum is
// rounded once for all rows.
int64_t SparseLloyd::units_of_zeros(int64_t mass, int64_t column) const {
  if (!units_.weights) return mass / static_cast<int64_t>(units_.mass_scale) * zero_units_[column];
  return nearest_integer(static_cast<double>(mass) / units_.mass_scale * zero_[column]);
}

std::vector<double> SparseLloyd::far_distances(int64_t count) const {
  const SparseSearch search(x_, exact_.data(), k_, parallel_);
  const auto error = [&](int64_t i) { return 4 * search.error(problem_.squares[i]); };
  std::vector<double> least;  // lower bounds of the distances of the rows with a mass
  for (int64_t i = 0; i < n_; ++i) {
    if (units_.mass(i) > 0) least.push_back(squares_[i] - error(i));
  }
  const int64_t last = std::min(count, static_cast<int64_t>(least.size())) - 1;
  std::nth_element(least.begin(), least.begin() + last, least.end(), std::greater<>());
  std::vector<double> found(n_);
  parallel_(n_, [&](int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      if (units_.mass(i) > 0 && !(squares_[i] + error(i) < least[last]))
        found[i] = search.distance(i, labels_[i]);
    }
  });
  return found;
}

void SparseLloyd::move(KMeansTotals& totals, int64_t row, int64_t from, int64_t to) const {
  std::vector<double> values(x_.d);
  for (int64_t i = x_.offsets[row]; i < x_.offsets[row + 1]; ++i) values[x_.columns[i]] = x_.value(i);
  const Dense dense{reinterpret_cast<const char*>(values.data()), true, 1, x_.d};
  const int64_t d = x_.d, mass = units_.mass(row);
  kmeans_kernel().move(dense, 0, units_.rounding, units_.weight(row), &totals.sums[from * d],
                       &totals.sums[to * d]);
  totals.masses[to] += mass, totals.masses[from] -= mass;
}

}  // namespace

void kmeans_sparse(const SparseRows& x, const double* weights, const void* init, int64_t k,
                   const KMeansOptions& options, const Parallel& parallel, const KMeansResult& result) {
  const SparseProblem problem(x, weights, options.tol > 0, parallel);
  SparseLloyd lloyd(problem, given_centers(init, k, x.d, x.wide, false), options, parallel);
  lloyd.run(problem.variance * options.tol);
  lloyd.write(result);
}

void kmeans_sparse_labels(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                          int64_t* labels, double* squares) {
  const std::vector<double> own = sparse_squares(x, parallel, kOp);
  const SparseSearch search(x, centers, k, parallel);
  parallel(x.n, [&](int64_t lo, int64_t hi) {
    std::vector<double> products = search.scratch();
    for (int64_t i = lo; i < hi; ++i) labels[i] = search.nearest(i, own[i], products.data(), squares[i]);
  });
}

void kmeans_sparse_distances(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                             void* distances) {
  const std::vector<double> own = sparse_squares(x, parallel, kOp);
  const SparseSearch search(x, centers, k, parallel);
  parallel(x.n, [&](int64_t lo, int64_t hi) {
    std::vector<double> products = search.scratch();
    for (int64_t i = lo; i < hi; ++i) {
      x.wide ? search.distances(i, own[i], products.data(), static_cast<double*>(distances) + i * k)
             : search.distances(i, own[i], products.data(), static_cast<float*>(distances) + i * k);
    }
  });
}

void kmeans_sparse_products(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                            double* products) {
  const CenterColumns columns(centers, k, x.d, parallel);
  parallel(x.n, [&](int64_t lo, int64_t hi) {
    std::vector<double> padded(columns.pitch());
    for (int64_t i = lo; i < hi; ++i) {
      columns.products(x.row(i), padded.data());
      std::copy_n(padded.begin(), k, products + i * k);
    }
  });
}

}  // namespace uefl::cpu
