#include "cpu/fsq.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/features.h"
#include "cpu/fsq_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kMostSteps = 32;  // from here on, a binary search takes fewer comparisons

const FsqKernel& kernel() { return pick<&fsq_portable, &fsq_avx2, &fsq_avx512>(); }

// Returns the least float32 that is not below x.
float rounded_up(double x) {
  const float nearest = static_cast<float>(x);
  return nearest < x ? std::nextafter(nearest, std::numeric_limits<float>::infinity()) : nearest;
}

// Returns how many of the sorted thresholds x reaches: 0 for NaN.
template <class T>
int32_t reached(const std::vector<T>& thresholds, T x) {
  const auto above = [](T value, T threshold) { return !(value >= threshold); };
  return static_cast<int32_t>(std::upper_bound(thresholds.begin(), thresholds.end(), x, above) -
                              thresholds.begin());
}

// Calls body(first row, rows, z, out, more) for tiles of rows [lo, hi). The arrays of a tile that is not full
// are copies with zeros behind them, and the results are copied back.
template <class Body>
void tiles(std::initializer_list<const float*> arrays, float* out, int64_t d, int64_t lo, int64_t hi,
           const Body& body) {
  for (int64_t row = lo; row < hi; row += kFsqRows) {
    const int64_t rows = std::min(kFsqRows, hi - row), count = rows * d;
    const float* from[2] = {};
    std::vector<float> copies[2];
    for (size_t i = 0; i < arrays.size(); ++i) {
      from[i] = arrays.begin()[i] + row * d;
      if (rows == kFsqRows) continue;
      copies[i].assign(kFsqRows * d, 0);
      std::copy_n(from[i], count, copies[i].begin());
      from[i] = copies[i].data();
    }
    if (rows == kFsqRows) {
      body(row, rows, from, out + row * d);
    } else {
      std::vector<float> results(kFsqRows * d);
      body(row, rows, from, results.data());
      std::copy_n(results.begin(), count, out + row * d);
    }
  }
}

}  // namespace

Fsq::ElementForm Fsq::element_of(int64_t levels) const {
  const auto inverse = [&](double bounded) { return form_.clamp ? bounded : std::atanh(bounded); };
  const double count = static_cast<double>(levels), last = count - 1;
  ElementForm element;
  if (form_.symmetric) {
    element.scale = 2 / last;
    for (double level = 1; level < count; ++level)
      element.thresholds.push_back(inverse((2 * level - count) / last));
  } else {
    const double half = last * (1 + 1e-3) / 2, offset = levels % 2 == 0 ? 0.5 : 0;
    element.center = element.divisor = std::floor(count / 2);
    element.shift = inverse(offset / half);
    element.slope = half / element.center;
    for (double level = 1; level < count; ++level)
      element.thresholds.push_back(inverse((level - element.center - 0.5 + offset) / half) - element.shift);
  }
  for (const double threshold : element.thresholds) element.rounded.push_back(rounded_up(threshold));
  return element;
}

Fsq::Fsq(FsqForm form) : form_(std::move(form)) {
  uint64_t factor = 1;  // it wraps where int64 counts fewer than all codewords; then no index is written
  for (const int64_t count : form_.levels) {
    elements_.push_back(element_of(count));
    factors_.push_back(static_cast<int64_t>(factor));
    factor *= static_cast<uint64_t>(count);
    steps_ = std::max(steps_, count - 1);
  }
  for (int64_t i = 0; i < kFsqRows * d(); ++i) {
    const ElementForm& element = elements_[i % d()];
    tile_.shift.push_back(static_cast<float>(element.shift));
    tile_.slope.push_back(static_cast<float>(element.slope));
    tile_.scale.push_back(static_cast<float>(element.scale));
    tile_.center.push_back(static_cast<float>(element.center));
    tile_.divisor.push_back(static_cast<float>(element.divisor));
  }
  for (int64_t step = 0; step < steps_ && steps_ < kMostSteps; ++step) {
    for (int64_t i = 0; i < kFsqRows * d(); ++i) {
      const std::vector<float>& rounded = elements_[i % d()].rounded;
      tile_.thresholds.push_back(step < static_cast<int64_t>(rounded.size()) ? rounded[step] : NAN);
    }
  }
}

template <class T>
void Fsq::write_indices(const FsqRun<T>& run, const int32_t* levels, int64_t lo, int64_t hi) const {
  if (!run.indices && !run.narrow) return;
  for (int64_t row = lo; row < hi; ++row, levels += d()) {
    int64_t index = 0;
    for (int64_t j = 0; j < d(); ++j) index += levels[j] * factors_[j];
    if (run.narrow)
      run.narrow[row] = static_cast<int32_t>(index);
    else
      run.indices[row] = index;
  }
}

void Fsq::forward(const FsqRun<float>& run, int64_t lo, int64_t hi) const {
  const int64_t n = kFsqRows * d();
  std::vector<int32_t> level(n);
  tiles({run.z}, run.quantized, d(), lo, hi, [&](int64_t row, int64_t rows, const float** z, float* out) {
    if (steps_ < kMostSteps) {
      kernel().levels(z[0], tile_.thresholds.data(), steps_, n, level.data());
    } else {
      for (int64_t i = 0; i < n; ++i) level[i] = reached(elements_[i % d()].rounded, z[0][i]);
    }
    kernel().values(z[0], level.data(), tile_.scale.data(), tile_.center.data(), tile_.divisor.data(), n,
                    out);
    write_indices(run, level.data(), row, row + rows);
  });
}

void Fsq::forward(const FsqRun<double>& run, int64_t lo, int64_t hi) const {
  std::vector<int32_t> level(d());
  for (int64_t row = lo; row < hi; ++row) {
    for (int64_t j = 0; j < d(); ++j) {
      const ElementForm& element = elements_[j];
      const double z = run.z[row * d() + j];
      level[j] = reached(element.thresholds, z);
      run.quantized[row * d() + j] =
          z == z ? (level[j] * element.scale - element.center) / element.divisor : z;
    }
    write_indices(run, level.data(), row, row + 1);
  }
}

void Fsq::backward(const FsqBackwardRun<float>& run, int64_t lo, int64_t hi) const {
  tiles({run.grad, run.z}, run.grad_z, d(), lo, hi, [&](int64_t, int64_t, const float** from, float* out) {
    kernel().backward(from[0], from[1], tile_.shift.data(), tile_.slope.data(), form_.clamp, kFsqRows * d(),
                      out);
  });
}

void Fsq::backward(const FsqBackwardRun<double>& run, int64_t lo, int64_t hi) const {
  for (int64_t i = lo * d(); i < hi * d(); ++i) {
    const ElementForm& element = elements_[i % d()];
    const double x = run.z[i] + element.shift, bounded = std::tanh(x);
    const double slope = form_.clamp ? (std::abs(x) <= 1 ? 1 : 0) : 1 - bounded * bounded;
    run.grad_z[i] = run.grad[i] * element.slope * slope;
  }
}

}  // namespace uefl::cpu
