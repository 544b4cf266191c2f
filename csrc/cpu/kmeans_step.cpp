#include "cpu/kmeans_step.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "cpu/features.h"
#include "cpu/striped_adder.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kRowsOfWork = 256;  // rows of a portion, for rows that cost little
constexpr int64_t kColumnsOfWork = 1024;
constexpr double kHeaviest = 0x1p1000;  // largest weight

// Returns the least e >= -900 with value < 2^e for a value above 0, and 0 for 0, as frexp does.
int64_t exponent(double value) {
  return value == 0 ? 0 : std::max((std::bit_cast<int64_t>(value) >> 52) - 1022, int64_t{-900});
}

}  // namespace

const KMeansKernel& kmeans_kernel() { return pick<&kmeans_portable, &kmeans_avx2, &kmeans_avx512>(); }

double tree_sum(std::vector<double> values) {
  values.resize(int64_t{1} << ceil_log2(static_cast<int64_t>(values.size())));
  for (size_t half = values.size() / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

DenseRows::DenseRows(const StridedRows& x)
    : x_(x),
      wide_(x.dtype == Dtype::f64),
      in_place_((wide_ || x.dtype == Dtype::f32) && (x.dim_stride == 1 || x.dim == 1) &&
                (x.inner == 1 || x.inner_stride == x.dim) &&
                (x.outer == 1 || x.outer_stride == x.inner * x.dim)) {}

Dense DenseRows::read(int64_t lo, int64_t hi) {
  const int64_t d = x_.dim, count = (hi - lo) * d;
  const char* data = static_cast<const char*>(x_.data);
  if (!in_place_) {
    memory_.resize(wide_ ? count : (count + 1) / 2);
    with_type(x_.dtype, [&]<class T>(const T*) {
      using Wide = decltype(widen(T{}));
      Wide* out = reinterpret_cast<Wide*>(memory_.data());
      for (int64_t i = lo; i < hi; ++i) {
        const T* row = reinterpret_cast<const T*>(element(x_, i, 0));
        for (int64_t j = 0; j < d; ++j) *out++ = widen(row[j * x_.dim_stride]);
      }
    });
    data = reinterpret_cast<const char*>(memory_.data()) - lo * d * (wide_ ? 8 : 4);
  }
  return {data, wide_, x_.outer * x_.inner, d};
}

void for_parts(const Dense& x, const Parallel& parallel, const PartWork& work) {
  if (x.n > kRowsOfWork) {
    return parallel((x.n + kRowsOfWork - 1) / kRowsOfWork, [&](int64_t lo, int64_t hi) {
      work(x, 0, lo * kRowsOfWork, std::min(x.n, hi * kRowsOfWork));
    });
  }
  parallel((x.d + kColumnsOfWork - 1) / kColumnsOfWork, [&](int64_t lo, int64_t hi) {
    for (int64_t first = lo * kColumnsOfWork; first < std::min(x.d, hi * kColumnsOfWork);
         first += kColumnsOfWork)
      work(x.columns(first, std::min(x.d, first + kColumnsOfWork)), first, 0, x.n);
  });
}

double least_power_of_two(double value) {
  int e = 0;
  const double mantissa = std::frexp(value, &e);
  return power_of_two(std::max(e - (mantissa == 0.5), -900));
}

KMeansScales scales_within(int64_t n, std::vector<double> low, std::vector<double> high,
                           const double* weights, const std::string& op) {
  const auto require = [&](bool condition, const char* expected) {
    if (!condition) throw std::runtime_error(op + ": " + expected);
  };
  const int64_t d = static_cast<int64_t>(low.size());
  bool valid = true;
  for (int64_t j = 0; j < d; ++j) {
    valid &= low[j] >= -kLargest && high[j] <= kLargest;
    const double middle = low[j] / 2 + high[j] / 2;
    high[j] = power_of_two(mass_bits(n) - exponent(std::max(high[j] - middle, middle - low[j])));
    low[j] = middle;
  }
  require(valid, "x holds values beyond 2^480 (3e144), and their squares overflow; scale x down");
  KMeansScales result{std::move(low), std::move(high), power_of_two(mass_bits(n)), 1};
  if (weights) {
    const double heaviest = *std::max_element(weights, weights + n);
    require(
        std::all_of(weights, weights + n, [](double weight) { return 0 <= weight && weight <= kHeaviest; }) &&
            heaviest > 0,
        "weights must be finite (at most 2^1000), not negative and not all zero");
    result.weight_unit = least_power_of_two(heaviest);
  }
  return result;
}

KMeansScales kmeans_scales(const StridedRows& x, const double* weights, const Parallel& parallel,
                           const std::string& op) {
  const int64_t n = x.outer * x.inner, d = x.dim;
  if (n == 0) return {std::vector<double>(d), std::vector<double>(d, 1), power_of_two(mass_bits(n)), 1};
  std::vector<double> low(d, std::numeric_limits<double>::infinity()),
      high(d, -std::numeric_limits<double>::infinity());
  std::atomic<bool> finite = true;
  std::mutex merge;
  const auto see = [&](const auto& read, int64_t columns, int64_t column, int64_t lo, int64_t hi) {
    std::vector<double> least(columns, std::numeric_limits<double>::infinity());
    std::vector<double> most(columns, -std::numeric_limits<double>::infinity());
    for (int64_t first = lo; first < hi; first += kRowsOfWork) {
      const int64_t last = std::min(hi, first + kRowsOfWork);
      if (!kmeans_kernel().range(read(first, last), first, last, least.data(), most.data())) finite = false;
    }
    const std::lock_guard<std::mutex> lock(merge);
    for (int64_t j = 0; j < columns; ++j) {
      low[column + j] = std::min(low[column + j], least[j]);
      high[column + j] = std::max(high[column + j], most[j]);
    }
  };
  if (DenseRows rows(x); rows.in_place()) {
    for_parts(rows.read(0, n), parallel, [&](const Dense& part, int64_t column, int64_t lo, int64_t hi) {
      see([&](int64_t, int64_t) { return part; }, part.d, column, lo, hi);
    });
  } else {
    parallel((n + kRowsOfWork - 1) / kRowsOfWork, [&](int64_t lo, int64_t hi) {
      DenseRows own(x);
      see([&](int64_t first, int64_t last) { return own.read(first, last); }, d, 0, lo * kRowsOfWork,
          std::min(n, hi * kRowsOfWork));
    });
  }
  if (!finite) throw std::runtime_error(op + ": x holds NaN or infinity; remove or replace those rows");
  return scales_within(n, std::move(low), std::move(high), weights, op);
}

void KMeansTotals::add(const Dense& x, const int64_t* rows, int64_t count, const KMeansUnits& units,
                       int64_t to) {
  kmeans_kernel().add(x, rows, count, units.rounding, units.weights, &sums[to * d]);
  for (int64_t i = 0; i < count; ++i) masses[to] += units.mass(rows[i]);
}

void KMeansTotals::move(const Dense& x, int64_t row, const KMeansUnits& units, int64_t from, int64_t to) {
  kmeans_kernel().move(x, row, units.rounding, units.weight(row), &sums[from * d], &sums[to * d]);
  const int64_t mass = units.mass(row);
  masses[to] += mass;
  masses[from] -= mass;
}

namespace {

// Rows of a block that have no old cluster. They wait until kAddedRows of them have the same new cluster.
class WaitingRows {
 public:
  WaitingRows(KMeansTotals& totals, const KMeansUnits& units) : totals_(totals), units_(units) {}

  void add(const Dense& x, int64_t row, int64_t to) {
    if (waiting_.empty()) waiting_.resize(totals_.masses.size());
    Group& rows = waiting_[to];
    rows.rows[rows.count++] = row;
    if (rows.count == kAddedRows) flush(x, to);
  }
  // Adds the rows of a cluster that still wait.
  void flush(const Dense& x, int64_t to) {
    if (waiting_.empty() || waiting_[to].count == 0) return;
    totals_.add(x, waiting_[to].rows, waiting_[to].count, units_, to);
    waiting_[to].count = 0;
  }

 private:
  struct Group {
    int64_t count, rows[kAddedRows];
  };
  KMeansTotals& totals_;
  const KMeansUnits& units_;
  std::vector<Group> waiting_;  // [k], or empty before the first row
};

}  // namespace

bool kmeans_step(const StridedRows& x, int64_t step, const std::function<FindLabels()>& finder,
                 const void* centers, const KMeansUnits& units, const Parallel& parallel, int64_t* labels,
                 KMeansTotals& totals, double* distances) {
  const int64_t n = x.outer * x.inner, d = x.dim, blocks = (n + step - 1) / step;
  const int64_t center_bytes = d * (x.dtype == Dtype::f64 ? 8 : 4);
  std::atomic<bool> changed = false;
  StripedAdder sums, masses;
  parallel(blocks, [&](int64_t lo, int64_t hi) {
    const bool alone = lo == 0 && hi == blocks;  // this thread needs no totals of its own
    KMeansTotals own(alone ? 0 : static_cast<int64_t>(totals.masses.size()), d);
    KMeansTotals& mine = alone ? totals : own;
    std::vector<int64_t> found(step);
    DenseRows rows(x);
    const FindLabels find = finder();
    WaitingRows added(mine, units);
    bool moved = false;
    for (int64_t block = lo; block < hi; ++block) {
      const int64_t first = block * step, last = std::min(n, first + step);
      const Dense dense = rows.read(first, last);
      std::copy(labels + first, labels + last, found.begin());
      find(dense, first, last, found.data());
      for (int64_t i = first; i < last; ++i) {
        const int64_t to = found[i - first];
        if (distances)
          distances[i] =
              kmeans_kernel().distance(dense, i, static_cast<const char*>(centers) + to * center_bytes);
        if (to == labels[i]) continue;
        labels[i] < 0 ? added.add(dense, i, to) : mine.move(dense, i, units, labels[i], to);
        labels[i] = to;
        moved = true;
      }
      for (int64_t i = first; i < last; ++i) added.flush(dense, found[i - first]);
    }
    if (!moved) return;
    changed = true;
    if (alone) return;
    sums.add(own.sums, totals.sums);
    masses.add(own.masses, totals.masses);
  });
  return changed;
}

bool kmeans_step(const StridedRows& x, const Search& search, const void* centers, const KMeansUnits& units,
                 const Parallel& parallel, int64_t* labels, KMeansTotals& totals, double* distances) {
  const auto finder = [&]() -> FindLabels {
    const auto scratch = std::make_shared<Search::Scratch>(search);
    return [&search, scratch](const Dense& rows, int64_t first, int64_t last, int64_t* found) {
      search.assign(rows_of(rows), first, last, found - first, *scratch);
    };
  };
  return kmeans_step(x, search.block_rows(x.dim), finder, centers, units, parallel, labels, totals,
                     distances);
}

}  // namespace uefl::cpu
