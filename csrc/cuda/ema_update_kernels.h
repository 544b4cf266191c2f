// The moving averages of csrc/common/ema_update.h on CUDA, in two launches. Each warp updates one codeword.
#pragma once

#include <cstdint>

#include "common/ema_update.h"
#include "cuda/rows.h"

namespace uefl::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;

static_assert(kTotalParts == kThreads && kNormParts == kWarp);

// Writes the new sizes and averages.
template <class T>
__global__ void __launch_bounds__(kThreads) move_averages(EmaUpdate<T> run) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int64_t codeword = static_cast<int64_t>(blockIdx.x) * kWarps + warp; codeword < run.codebooks * run.k;
       codeword += static_cast<int64_t>(gridDim.x) * kWarps) {
    const double* sum = run.sums + codeword * run.d;
    bool invalid = false;
    for (int64_t j = lane; j < run.d; j += kWarp) invalid |= sum[j] != sum[j];
    invalid = __any_sync(kAllLanes, invalid);
    const AverageStep<T> move = step_of(run, codeword);
    if (lane == 0)
      run.new_sizes[codeword] =
          move(run.sizes[codeword], invalid ? T(0) : static_cast<T>(run.counts[codeword]));
    const T* average = run.averages + codeword * run.d;
    T* out = run.new_averages + codeword * run.d;
    for (int64_t j = lane; j < run.d; j += kWarp)  // this second read of sum hits the L1 cache
      out[j] = move(average[j], invalid ? T(0) : static_cast<T>(sum[j]));
  }
}

// Writes the new codewords. Thread block b takes codewords of codebook b % codebooks, and each codebook has
// the same number of thread blocks. Each thread block adds all sizes of its codebook, so the launcher starts
// no more thread blocks than run at a time.
template <class T>
__global__ void __launch_bounds__(kThreads) set_codewords(EmaUpdate<T> run) {
  __shared__ double parts[kTotalParts];
  const int64_t codebook = blockIdx.x % run.codebooks, first = codebook * run.k;
  double part = 0;
  for (int64_t i = threadIdx.x; i < run.k; i += kThreads) part += run.new_sizes[first + i];
  parts[threadIdx.x] = part;
  for (unsigned step = kTotalParts / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
  }
  __syncthreads();
  const T total = static_cast<T>(parts[0]);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t block = blockIdx.x / run.codebooks, blocks = gridDim.x / run.codebooks;
  for (int64_t i = block * kWarps + warp; i < run.k; i += blocks * kWarps) {
    const int64_t codeword = first + i;
    const T size = smoothed(run, codeword, total);
    const T *average = run.new_averages + codeword * run.d, *old = run.codewords + codeword * run.d;
    T* out = run.new_codewords + codeword * run.d;
    if (!(size > 0)) {
      for (int64_t j = lane; j < run.d; j += kWarp) out[j] = old[j];
      continue;
    }
    double squares = 0;
    for (int64_t j = lane; j < run.d; j += kWarp) {
      const T value = average[j] / size;
      out[j] = value;
      squares += multiply(static_cast<double>(value), static_cast<double>(value));
    }
    if (!run.unit) continue;
    const T norm = length<T>(warp_sum(squares));
    for (int64_t j = lane; j < run.d; j += kWarp) out[j] /= norm;
  }
}

}  // namespace
}  // namespace uefl::cuda
