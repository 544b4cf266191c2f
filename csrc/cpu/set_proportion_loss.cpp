#include "cpu/set_proportion_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "cpu/softmax.h"

namespace uefl::cpu {
namespace {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "set_proportion_loss: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double log_sum_exp(const double* values, int64_t count, int64_t stride) {
  double most = -std::numeric_limits<double>::infinity(), total = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(values[i * stride])) return kNan;
    most = std::max(most, values[i * stride]);
  }
  if (std::isinf(most)) return most;
  for (int64_t i = 0; i < count; ++i) total += std::exp(values[i * stride] - most);
  return most + std::log(total);
}

// Evaluates one set by the definition. Returns its loss.
template <class T>
double define(const StridedRows& logits, int64_t begin, int64_t end, const T* proportions, void* gradient) {
  const int64_t k = logits.dim, n = end - begin;
  std::vector<double> log_p(n * k), total(k);
  for (int64_t i = 0; i < n; ++i) {
    const std::vector<double> z = read_row(logits, begin + i);
    double all = log_sum_exp(z.data(), k, 1);
    // This is not a distribution: all classes become NaN.
    if (std::isinf(all)) all = kNan;
    for (int64_t j = 0; j < k; ++j) log_p[i * k + j] = z[j] - all;
  }
  double loss = 0;
  for (int64_t j = 0; j < k; ++j) {
    total[j] = log_sum_exp(&log_p[j], n, k);
    if (proportions[j] != 0)
      loss -= static_cast<double>(proportions[j]) * (total[j] - std::log(static_cast<double>(n)));
  }
  for (int64_t i = 0; gradient && i < n; ++i) {
    std::vector<double> slope(k);
    double pull = 0;
    for (int64_t j = 0; j < k; ++j) {
      if (proportions[j] != 0)
        slope[j] = static_cast<double>(proportions[j]) * std::exp(log_p[i * k + j] - total[j]);
      pull += slope[j];
    }
    for (int64_t j = 0; j < k; ++j) slope[j] = std::exp(log_p[i * k + j]) * pull - slope[j];
    write_row(slope, logits.dtype, gradient, begin + i);
  }
  return loss;
}

// The tolerance refuses percentages and counts, but not the errors of rounding and clamping.
constexpr double kTolerance = 1e-3;

template <class T>
void check_proportions(const Sets& sets) {
  for (int64_t s = 0; s < sets.sets; ++s) {
    const T* of_set = static_cast<const T*>(sets.proportions) + s * sets.k;
    double total = 0;
    for (int64_t j = 0; j < sets.k; ++j) {
      total += of_set[j];
      if (of_set[j] >= 0 && std::isfinite(of_set[j])) continue;
      fail("proportions[", s, ", ", j, "] is ", of_set[j], ", expected a finite number of at least 0");
    }
    if (std::abs(total - 1) > kTolerance) {
      fail("proportions of set ", s, " sum to ", total, ", expected 1 within ", kTolerance,
           "; divide each row by its sum");
    }
  }
}

}  // namespace

void check(const Sets& sets, const StridedRows& logits) {
  const int64_t n = logits.outer * logits.inner, first = sets.offsets[0], last = sets.offsets[sets.sets];
  if (first != 0 || last != n)
    fail("offsets run from ", first, " to ", last, ", expected from 0 to the ", n, " rows of logits");
  for (int64_t s = 0; s < sets.sets; ++s) {
    const int64_t rows = sets.offsets[s + 1] - sets.offsets[s];
    if (rows <= 0) fail("set ", s, " has ", rows, " rows, expected at least one; leave empty sets out");
  }
  logits.dtype == Dtype::f64 ? check_proportions<double>(sets) : check_proportions<float>(sets);
}

void set_proportion_loss(const Sets& sets, const StridedRows& logits, int64_t lo, int64_t hi, void* loss,
                         void* gradient) {
  const int64_t k = sets.k, end = padded(k);
  std::vector<float> scratch(3 * end);
  for (int64_t s = lo; s < hi; ++s) {
    const int64_t first = sets.offsets[s], last = sets.offsets[s + 1];
    if (logits.dtype == Dtype::f64) {
      const double* proportions = static_cast<const double*>(sets.proportions) + s * k;
      static_cast<double*>(loss)[s] = define(logits, first, last, proportions, gradient);
      continue;
    }
    const float* proportions = static_cast<const float*>(sets.proportions) + s * k;
    const ProportionRun run{.logits = logits,
                            .lo = first,
                            .hi = last,
                            .proportions = proportions,
                            .row = scratch.data(),
                            .pull = scratch.data() + end,
                            .sums = scratch.data() + 2 * end,
                            .gradient = static_cast<char*>(gradient)};
    double total = 0;
    if (softmax_kernel().proportion(run)) {
      for (int64_t j = 0; j < k; ++j) {
        if (proportions[j] > 0)
          total -= proportions[j] * std::log(run.sums[j] / static_cast<double>(last - first));
      }
    } else {
      total = define(logits, first, last, proportions, gradient);
    }
    static_cast<float*>(loss)[s] = static_cast<float>(total);
  }
}

}  // namespace uefl::cpu
