#include "cpu/kmeans.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "cpu/kmeans_grid.h"
#include "cpu/kmeans_kernel.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kRowsOfWork = 256;    // of one portion, where a row costs little
constexpr double kLargest = 0x1p480;    // of an element: the squares of 2^60 of them add up in float64
constexpr double kHeaviest = 0x1p1000;  // of a weight

// Sum by halves: value i and value i + half, half a power of two.
double tree_sum(std::vector<double> values) {
  values.resize(int64_t{1} << ceil_log2(static_cast<int64_t>(values.size())));
  for (size_t half = values.size() / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

// The least e >= -900 with value < 2^e.
int exponent(double value) {
  int e = 0;
  std::frexp(value, &e);
  return std::max(e, -900);
}

double power_of_two(int64_t e) { return std::ldexp(1.0, static_cast<int>(e)); }

// square_norms of ops/kmeans/reference.py.
double square_norm(const double* values, int64_t d) {
  double total[8] = {};
  for (int64_t j = 0; j < d; ++j) total[j % 8] += values[j] * values[j];
  return ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
}

// A row at length 1; one of zeros stays. False when it is zero.
bool to_unit(double* values, int64_t d) {
  const double norm = std::sqrt(square_norm(values, d));
  for (int64_t j = 0; j < d; ++j) values[j] = norm > 0 ? values[j] / norm : 0;
  return std::any_of(values, values + d, [](double value) { return value != 0; });
}

// k centres [k, d] in the dtype of the rows, with the same numbers in float64 beside them.
class Centres {
 public:
  Centres(int64_t k, int64_t d, bool wide) : d_(d), wide_(wide), exact_(k * d), narrow_(wide ? 0 : k * d) {}

  const void* data() const { return wide_ ? static_cast<const void*>(exact_.data()) : narrow_.data(); }
  const char* centre(int64_t k) const { return static_cast<const char*>(data()) + k * d_ * (wide_ ? 8 : 4); }
  const double* exact(int64_t k) const { return &exact_[k * d_]; }
  int64_t bytes() const { return static_cast<int64_t>(exact_.size()) * (wide_ ? 8 : 4); }

  // Rounds to the dtype of the rows.
  void set(int64_t k, const double* values) {
    for (int64_t i = k * d_; i < (k + 1) * d_; ++i, ++values) {
      exact_[i] = wide_ ? *values : (narrow_[i] = static_cast<float>(*values));
    }
  }

 private:
  int64_t d_;
  bool wide_;
  std::vector<double> exact_;
  std::vector<float> narrow_;
};

// Rows and everything that does not change during a fit: Data of ops/kmeans/reference.py.
class Data {
 public:
  Data(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel);

  const Dense& dense() const { return dense_; }
  Rows rows() const { return {dense_.data, dense_.wide ? Dtype::f64 : Dtype::f32, dense_.n, 1, dense_.d, dense_.d, 0, 1}; }
  const Parallel& parallel() const { return parallel_; }
  const Rounding rounding() const { return {middle_.data(), scale_.data()}; }
  double weight(int64_t row) const { return weights_.empty() ? 1 : weights_[row]; }
  double weight_unit() const { return weight_unit_; }
  int64_t mass(int64_t row) const { return masses_.empty() ? int64_t{1} << mass_bits(dense_.n) : masses_[row]; }
  double variance() const { return variance_; }

  Centres given(const void* init, int64_t k, bool spherical) const;
  Centres seeds(Seeding seeding, int64_t k, uint64_t seed, int64_t restart) const;
  // Squared distances of the rows to their centres.
  std::vector<double> distances(const Centres& centres, const int64_t* labels) const;

 private:
  void make_dense(const Rows& x, bool spherical);
  void find_range();
  void make_grid(int64_t bits, double scale, bool keep);
  // Calls work(lo, hi) for portions of the rows, at the same time.
  template <class Work>
  void for_rows(const Work& work) const;

  const Parallel& parallel_;
  const KMeansKernel& kernel_ = kmeans_kernel();
  std::vector<double> copy_;  // of x, when it is not dense
  Dense dense_;
  std::vector<double> weights_;  // at most 1, or empty
  std::vector<int64_t> masses_;  // or empty: all the same
  double weight_unit_ = 1, variance_ = 0;
  std::vector<double> middle_, scale_, reach_;
  std::unique_ptr<Grid> grid_;
};

template <class Work>
void Data::for_rows(const Work& work) const {
  const int64_t n = dense_.n;
  parallel_((n + kRowsOfWork - 1) / kRowsOfWork, [&](int64_t lo, int64_t hi) { work(lo * kRowsOfWork, std::min(n, hi * kRowsOfWork)); });
}

Data::Data(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel) : parallel_(parallel) {
  make_dense(problem.x, options.spherical);
  find_range();
  const int64_t n = dense_.n, d = dense_.d;
  if (problem.weights) {
    weights_.assign(problem.weights, problem.weights + n);
    const auto valid = [](double weight) { return 0 <= weight && weight <= kHeaviest; };
    if (!std::all_of(weights_.begin(), weights_.end(), valid) || *std::max_element(weights_.begin(), weights_.end()) == 0) {
      throw std::runtime_error("kmeans: weights must be finite (at most 2^1000), not negative and not all zero");
    }
    weight_unit_ = normalise(weights_);
    const double scale = power_of_two(mass_bits(n));
    masses_.resize(n);
    std::transform(weights_.begin(), weights_.end(), masses_.begin(), [&](double weight) { return std::llrint(weight * scale); });
  }
  scale_.resize(d);
  for (int64_t j = 0; j < d; ++j) scale_[j] = power_of_two(mass_bits(n) - exponent(reach_[j]));
  const bool seeding = options.seeding != Seeding::given;
  if (seeding || options.tol > 0) {
    const int64_t bits = std::min<int64_t>(kGridBits, (60 - ceil_log2(n * d)) / 2);
    make_grid(bits, power_of_two(bits - exponent(*std::max_element(reach_.begin(), reach_.end()))), seeding);
  }
}

void Data::make_dense(const Rows& x, bool spherical) {
  const int64_t n = x.outer * x.inner, d = x.dim;
  const bool wide = x.dtype == Dtype::f64;
  const bool whole = x.dim_stride == 1 && (x.inner == 1 || x.inner_stride == d) && (x.outer == 1 || x.outer_stride == x.inner * d);
  dense_ = {static_cast<const char*>(x.data), wide, n, d};
  if (whole && !spherical && (wide || x.dtype == Dtype::f32)) return;
  copy_.resize(wide ? n * d : (n * d + 1) / 2);
  dense_.data = reinterpret_cast<const char*>(copy_.data());
  for_rows([&](int64_t lo, int64_t hi) {
    std::vector<double> values(d);
    for (int64_t i = lo; i < hi; ++i) {
      const char* source = element(x, i, 0);
      with_type(x.dtype, [&]<class T>(const T*) {
        for (int64_t j = 0; j < d; ++j) values[j] = static_cast<double>(widen(reinterpret_cast<const T*>(source)[j * x.dim_stride]));
      });
      if (spherical) to_unit(values.data(), d);
      if (wide) {
        std::copy(values.begin(), values.end(), &copy_[i * d]);
      } else {
        std::copy(values.begin(), values.end(), reinterpret_cast<float*>(copy_.data()) + i * d);
      }
    }
  });
}

void Data::find_range() {
  const int64_t d = dense_.d;
  std::vector<double> low(d, std::numeric_limits<double>::infinity()), high(d, -std::numeric_limits<double>::infinity());
  bool finite = true;
  std::mutex merge;
  for_rows([&](int64_t lo, int64_t hi) {
    std::vector<double> least(d, std::numeric_limits<double>::infinity()), most(d, -std::numeric_limits<double>::infinity());
    const bool all = kernel_.range(dense_, lo, hi, least.data(), most.data());
    const std::lock_guard<std::mutex> lock(merge);
    finite = finite && all;
    for (int64_t j = 0; j < d; ++j) low[j] = std::min(low[j], least[j]), high[j] = std::max(high[j], most[j]);
  });
  if (!finite) throw std::runtime_error("kmeans: x holds NaN or infinity; remove or replace those rows");
  middle_.resize(d);
  reach_.resize(d);
  for (int64_t j = 0; j < d; ++j) {
    middle_[j] = low[j] / 2 + high[j] / 2;
    reach_[j] = std::max(high[j] - middle_[j], middle_[j] - low[j]);
    if (low[j] < -kLargest || high[j] > kLargest) {
      throw std::runtime_error("kmeans: x holds values beyond 2^480 (3e144), whose squares overflow; scale x down");
    }
  }
}

// The rows as whole numbers, kept for seeding or only to see how much they vary.
void Data::make_grid(int64_t bits, double scale, bool keep) {
  const int64_t n = dense_.n, d = dense_.d;
  if (keep) grid_ = std::make_unique<Grid>(n, d, bits, weights_, parallel_);
  const std::vector<double> scales(d, scale);
  std::vector<int64_t> sums(d), squares(d);
  std::mutex merge;
  for_rows([&](int64_t lo, int64_t hi) {
    std::vector<int16_t> values(d);
    std::vector<int64_t> sum(d), square(d);
    for (int64_t i = lo; i < hi; ++i) {
      kernel_.quantise(dense_, i, {middle_.data(), scales.data()}, values.data(), sum.data(), square.data());
      if (keep) grid_->store(i, values.data());
    }
    const std::lock_guard<std::mutex> lock(merge);
    for (int64_t j = 0; j < d; ++j) sums[j] += sum[j], squares[j] += square[j];
  });
  std::vector<double> variances(d);
  for (int64_t j = 0; j < d; ++j) {
    const double count = static_cast<double>(n), mean = static_cast<double>(sums[j]) / count;
    variances[j] = static_cast<double>(squares[j]) / count - mean * mean;
  }
  variance_ = tree_sum(variances) / static_cast<double>(d) / scale / scale;
}

Centres Data::given(const void* init, int64_t k, bool spherical) const {
  const int64_t d = dense_.d;
  Centres centres(k, d, dense_.wide);
  std::vector<double> values(d);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < d; ++j) {
      values[j] = dense_.wide ? static_cast<const double*>(init)[i * d + j] : static_cast<const float*>(init)[i * d + j];
      if (!(std::abs(values[j]) <= kLargest)) throw std::runtime_error("kmeans: init must be finite, and at most 2^480 (3e144)");
    }
    if (spherical) to_unit(values.data(), d);
    centres.set(i, values.data());
  }
  return centres;
}

Centres Data::seeds(Seeding seeding, int64_t k, uint64_t seed, int64_t restart) const {
  const std::vector<int64_t> chosen = grid_->seeds(seeding, k, seed, restart);
  std::vector<char> rows;
  for (const int64_t row : chosen) rows.insert(rows.end(), dense_.row(row), dense_.row(row + 1));
  return given(rows.data(), k, false);
}

std::vector<double> Data::distances(const Centres& centres, const int64_t* labels) const {
  std::vector<double> result(dense_.n);
  for_rows([&](int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) result[i] = kernel_.distance(dense_, i, centres.centre(labels[i]));
  });
  return result;
}

// Sums of the rows of each cluster, less the middle, and their masses.
struct Totals {
  Totals(int64_t k, int64_t d) : sums(k * d), masses(k) {}

  void add(const Totals& other) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += other.sums[i];
    for (size_t i = 0; i < masses.size(); ++i) masses[i] += other.masses[i];
  }

  std::vector<int64_t> sums, masses;
};

// One run from given centres.
class Lloyd {
 public:
  Lloyd(const Data& data, Centres centres, bool spherical)
      : data_(data),
        dense_(data.dense()),
        k_(centres.bytes() / (dense_.d * (dense_.wide ? 8 : 4))),
        spherical_(spherical),
        centres_(std::move(centres)),
        totals_(k_, dense_.d),
        labels_(dense_.n, -1),
        found_(dense_.n) {}

  void run(int64_t max_iter, double limit);

  double inertia() const { return inertia_; }
  void write(const KMeansProblem& problem) const {
    std::memcpy(problem.centres, centres_.data(), centres_.bytes());
    std::copy(labels_.begin(), labels_.end(), problem.labels);
    *problem.inertia = inertia_;
    *problem.iterations = iterations_;
  }

 private:
  bool assign();
  void move(int64_t row, Totals& totals);
  double update();
  void fill_empty(Totals& totals) const;

  const Data& data_;
  const Dense& dense_;
  const int64_t k_;
  const bool spherical_;
  Centres centres_;
  Totals totals_;  // of labels_
  std::vector<int64_t> labels_, found_;
  double inertia_ = 0;
  int64_t iterations_ = 0;
};

void Lloyd::run(int64_t max_iter, double limit) {
  bool settled = false;  // labels belong to the centres
  while (iterations_ < max_iter && !settled) {
    const bool changed = assign();
    ++iterations_;
    const bool empty = std::count(totals_.masses.begin(), totals_.masses.end(), 0) > 0;
    const double shift = update();
    settled = !changed && !empty;
    if (!settled && shift <= limit) break;
  }
  if (!settled) assign();
  std::vector<double> distances = data_.distances(centres_, labels_.data());
  for (int64_t i = 0; i < dense_.n; ++i) distances[i] *= data_.weight(i);
  inertia_ = tree_sum(std::move(distances)) * data_.weight_unit();
}

// Gives each row the label of its nearest centre and brings the totals up to date; true when a label changed.
bool Lloyd::assign() {
  const Search search({centres_.data(), dense_.wide ? Dtype::f64 : Dtype::f32, 1, k_, dense_.d}, Metric::l2, true, "kmeans");
  const Rows rows = data_.rows();
  const int64_t step = search.block_rows(dense_.d), blocks = (dense_.n + step - 1) / step;
  std::atomic<bool> changed = false;
  std::mutex merge;
  data_.parallel()(blocks, [&](int64_t lo, int64_t hi) {
    const bool alone = lo == 0 && hi == blocks;  // needs no totals of its own
    Totals own(alone ? 0 : k_, dense_.d);
    Totals& totals = alone ? totals_ : own;
    bool moved = false;
    for (int64_t block = lo; block < hi; ++block) {
      const int64_t first = block * step, last = std::min(dense_.n, first + step);
      search.assign(rows, first, last, found_.data());
      for (int64_t i = first; i < last; ++i) {
        if (found_[i] == labels_[i]) continue;
        move(i, totals);
        moved = true;
      }
    }
    if (!moved) return;
    changed = true;
    if (alone) return;
    const std::lock_guard<std::mutex> lock(merge);
    totals_.add(own);
  });
  return changed;
}

void Lloyd::move(int64_t row, Totals& totals) {
  const int64_t to = found_[row], from = labels_[row], mass = data_.mass(row);
  int64_t* old = from < 0 ? nullptr : &totals.sums[from * dense_.d];
  kmeans_kernel().move(dense_, row, data_.rounding(), data_.weight(row), &totals.sums[to * dense_.d], old);
  totals.masses[to] += mass;
  if (old) totals.masses[from] -= mass;
  labels_[row] = to;
}

// Moves the centres to the means of their clusters; returns the sum of the squares of the moves.
double Lloyd::update() {
  const int64_t d = dense_.d;
  const double mass_scale = power_of_two(mass_bits(dense_.n));
  const Rounding rounding = data_.rounding();
  std::unique_ptr<Totals> filled;
  if (std::count(totals_.masses.begin(), totals_.masses.end(), 0) > 0) {
    filled = std::make_unique<Totals>(totals_);
    fill_empty(*filled);
  }
  const Totals& totals = filled ? *filled : totals_;
  std::vector<double> mean(d), moves(k_);
  for (int64_t k = 0; k < k_; ++k) {
    if (totals.masses[k] == 0) continue;
    const double mass = static_cast<double>(totals.masses[k]) / mass_scale;
    for (int64_t j = 0; j < d; ++j) {
      mean[j] = rounding.middle[j] + static_cast<double>(totals.sums[k * d + j]) / rounding.scale[j] / mass;
    }
    if (spherical_ && !to_unit(mean.data(), d)) continue;
    const std::vector<double> before(centres_.exact(k), centres_.exact(k) + d);
    centres_.set(k, mean.data());
    for (int64_t j = 0; j < d; ++j) mean[j] = centres_.exact(k)[j] - before[j];
    moves[k] = square_norm(mean.data(), d);
  }
  return tree_sum(moves);
}

// The first empty cluster takes the row that is farthest from its centre, the second one the next; update() of the reference.
void Lloyd::fill_empty(Totals& totals) const {
  const std::vector<double> distances = data_.distances(centres_, labels_.data());
  const int64_t n = dense_.n, spread = (int64_t{1} << ceil_log2(n)) - 1;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) {
    if (distances[i] > 0 && data_.mass(i) > 0) keys.push_back((std::bit_cast<int64_t>(distances[i]) & ~spread) | (spread - i));
  }
  const int64_t empty = std::count(totals.masses.begin(), totals.masses.end(), 0);
  const int64_t fill = std::min(empty, static_cast<int64_t>(keys.size()));
  std::partial_sort(keys.begin(), keys.begin() + fill, keys.end(), std::greater<>());
  for (int64_t k = 0, next = 0; k < k_ && next < fill; ++k) {
    if (totals_.masses[k] != 0) continue;
    const int64_t row = spread - (keys[next++] & spread), from = labels_[row], mass = data_.mass(row), d = dense_.d;
    kmeans_kernel().move(dense_, row, data_.rounding(), data_.weight(row), &totals.sums[k * d], &totals.sums[from * d]);
    totals.masses[k] += mass;
    totals.masses[from] -= mass;
  }
}

}  // namespace

void kmeans(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel) {
  const Data data(problem, options, parallel);
  double lowest = std::numeric_limits<double>::infinity();
  for (int64_t restart = 0; restart < options.n_init; ++restart) {
    Lloyd lloyd(data,
                options.seeding == Seeding::given ? data.given(problem.init, problem.k, options.spherical)
                                                  : data.seeds(options.seeding, problem.k, problem.seed, restart),
                options.spherical);
    lloyd.run(options.max_iter, data.variance() * options.tol);
    if (restart == 0 || lloyd.inertia() < lowest) {
      lowest = lloyd.inertia();
      lloyd.write(problem);
    }
  }
}

}  // namespace uefl::cpu
