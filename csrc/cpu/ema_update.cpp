#include "cpu/ema_update.h"

#include <algorithm>

namespace uefl::cpu {
namespace {

// Adds kParts partial sums: in each step, the second half to the first half.
template <int kParts>
double tree(double (&parts)[kParts]) {
  for (int step = kParts / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) parts[i] += parts[i + step];
  }
  return parts[0];
}

}  // namespace

template <class T>
void move_averages(const EmaUpdate<T>& run, int64_t lo, int64_t hi) {
  for (int64_t codeword = lo; codeword < hi; ++codeword) {
    const double* sum = run.sums + codeword * run.d;
    bool valid = true;
    for (int64_t j = 0; j < run.d; ++j) valid &= sum[j] == sum[j];
    const AverageStep<T> move = step_of(run, codeword);
    run.new_sizes[codeword] = move(run.sizes[codeword], valid ? static_cast<T>(run.counts[codeword]) : T(0));
    const T* average = run.averages + codeword * run.d;
    T* out = run.new_averages + codeword * run.d;
    for (int64_t j = 0; j < run.d; ++j) out[j] = move(average[j], valid ? static_cast<T>(sum[j]) : T(0));
  }
}

template <class T>
T total_size(const EmaUpdate<T>& run, int64_t codebook) {
  const T* sizes = run.new_sizes + codebook * run.k;
  double parts[kTotalParts] = {};
  for (int64_t i = 0; i < run.k; ++i) parts[i % kTotalParts] += sizes[i];
  return static_cast<T>(tree(parts));
}

template <class T>
void set_codewords(const EmaUpdate<T>& run, const T* totals, int64_t lo, int64_t hi) {
  for (int64_t codeword = lo; codeword < hi; ++codeword) {
    const T size = smoothed(run, codeword, totals[codeword / run.k]);
    const T *average = run.new_averages + codeword * run.d, *old = run.codewords + codeword * run.d;
    T* out = run.new_codewords + codeword * run.d;
    if (!(size > 0)) {
      std::copy_n(old, run.d, out);
      continue;
    }
    double squares[kNormParts] = {};
    for (int64_t j = 0; j < run.d; ++j) out[j] = average[j] / size;
    if (!run.unit) continue;
    for (int64_t j = 0; j < run.d; ++j)
      squares[j % kNormParts] += static_cast<double>(out[j]) * static_cast<double>(out[j]);
    const T norm = length<T>(tree(squares));
    for (int64_t j = 0; j < run.d; ++j) out[j] /= norm;
  }
}

template void move_averages(const EmaUpdate<float>&, int64_t, int64_t);
template void move_averages(const EmaUpdate<double>&, int64_t, int64_t);
template float total_size(const EmaUpdate<float>&, int64_t);
template double total_size(const EmaUpdate<double>&, int64_t);
template void set_codewords(const EmaUpdate<float>&, const float*, int64_t, int64_t);
template void set_codewords(const EmaUpdate<double>&, const double*, int64_t, int64_t);

}  // namespace uefl::cpu
