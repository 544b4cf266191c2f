// All stages of rvq for a few rows on CUDA, in one launch. A thread block keeps a row, its residual and the
// sum of its codewords in shared memory from the first stage to the last one. One launch per stage gives the
// same bits.
//
// There is no codebook to pack. A thread block reads the codewords unchanged and compares |x - c|^2 in
// float32. All terms are positive, so a score has a relative error below (d + 8) 2^-23, and underflow adds
// less than d 2^-120. If the best and the second-best score are closer than that, the definition decides.
//
// Bytes: all codebooks for each row, from the second-level cache.
#pragma once

#include <cstdint>

#include "cuda/grid.h"
#include "cuda/rows.h"
#include "cuda/sums.h"
#include "cuda/vq_assign_definition.h"

namespace uefl::cuda {
namespace {

constexpr int kMostStages = 64;
constexpr int kRvqLanes = 8;                                         // lanes that share a codeword
constexpr int kRvqBlocks = 2;                                        // largest number of thread blocks on a
                                                                     // multiprocessor
constexpr int64_t kMostRvqElements = 1 << 17, kMostRvqWidth = 4096;  // largest x, largest d

struct RvqCodebook {
  const float* codewords;  // [codebooks, k, d]
  int64_t k;
  long long* counts;  // [codebooks, k]
};

template <class T>
struct Rvq {
  RvqCodebook stage[kMostStages];
  int stages;
  T* quantized;       // [outputs, d]
  int64_t* indices;   // [outputs, stages]
  float* losses;      // [stages]
  double factor;      // of the sum of squares
  double* errors;     // workspace: [stages, outputs]
  long long* counts;  // of all stages
  int64_t codewords;
};

// Returns the value rounded to the type of x.
template <class T>
__device__ inline float rounded(float value) {
  T out;
  narrow(value, out);
  return widen(out);
}

// The best and the second-best score so far. NaN never enters. Ties go to the lower index.
struct FloatTopTwo {
  float best = INFINITY, second = INFINITY;
  int index = 0;

  __device__ void add(float score, int code) {
    const bool lower = score < best;
    second = lower ? best : fminf(second, score);
    index = lower ? code : index;
    best = lower ? score : best;
  }

  __device__ void merge(float other_best, float other_second, int other_index) {
    const bool lower = other_best < best || (other_best == best && other_index < index);
    second = fminf(fminf(second, other_second), fmaxf(best, other_best));
    index = lower ? other_index : index;
    best = fminf(best, other_best);
  }
};

// Returns the nearest codeword by float32 scores, or a negative number if the definition must decide. All
// threads of the thread block call it.
__device__ inline int nearest_in_float32(const float* row, const float* codewords, int k, int d) {
  __shared__ float bests[kThreads / kWarp], seconds[kThreads / kWarp];
  __shared__ int numbers[kThreads / kWarp];
  const int lane = threadIdx.x % kRvqLanes, groups = blockDim.x / kRvqLanes;
  FloatTopTwo found;
  for (int first = 0; first < k; first += groups) {
    const int code = first + static_cast<int>(threadIdx.x) / kRvqLanes;
    const float* codeword = codewords + int64_t{code < k ? code : 0} * d;
    float score = 0;
    UEFL_UNROLL_BY(4)
    for (int j = lane * 4; j < d; j += kRvqLanes * 4) {
      const Four<float> a = load_four(row + j), b = load_four(codeword + j);
      UEFL_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float difference = a.values[e] - b.values[e];
        score = fmaf(difference, difference, score);
      }
    }
    for (int step = kRvqLanes / 2; step > 0; step /= 2) score += __shfl_xor_sync(kAllLanes, score, step);
    found.add(code < k ? score : INFINITY, code);
  }
  for (int step = kRvqLanes; step < kWarp; step *= 2) {
    found.merge(__shfl_xor_sync(kAllLanes, found.best, step), __shfl_xor_sync(kAllLanes, found.second, step),
                __shfl_xor_sync(kAllLanes, found.index, step));
  }
  __syncthreads();
  const unsigned own = threadIdx.x / kWarp;
  if (threadIdx.x % kWarp == 0)
    bests[own] = found.best, seconds[own] = found.second, numbers[own] = found.index;
  __syncthreads();
  found = {bests[0], seconds[0], numbers[0]};
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp)
    found.merge(bests[warp], seconds[warp], numbers[warp]);
  const float relative = static_cast<float>(d + 8) * 0x1.1p-22f, least = static_cast<float>(d) * 0x1p-118f;
  const bool certain = found.best < 0x1p120f && found.second * (1 - relative) - found.best > least;
  return certain ? found.index : -1;
}

// Runs all stages. The launch is cooperative, with one thread block for each output. d is a multiple of four,
// and codewords begin at multiples of 16 bytes.
template <class T>
__global__ void __launch_bounds__(kThreads, kRvqBlocks)
    rvq_few(const T* x, const __grid_constant__ Shape shape, const __grid_constant__ Rvq<T> wanted) {
  const int d = static_cast<int>(shape.d);
  float* residual = reinterpret_cast<float*>(dynamic_memory());
  float* sum = residual + d;
  const int64_t output = blockIdx.x, codebook = shape.codebooks == 1 ? 0 : output % shape.codebooks;
  const T* row = x + shape.begin(output);
  for (int j = threadIdx.x; j < d; j += blockDim.x) residual[j] = widen(row[j * shape.stride]), sum[j] = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < wanted.codewords;
       i += int64_t{gridDim.x} * blockDim.x)
    wanted.counts[i] = 0;
  __syncthreads();
  int64_t* indices = wanted.indices + output * wanted.stages;
  for (int number = 0; number < wanted.stages; ++number) {
    const RvqCodebook& stage = wanted.stage[number];
    const int k = static_cast<int>(stage.k);
    const float* codewords = stage.codewords + codebook * stage.k * d;
    int code = nearest_in_float32(residual, codewords, k, d);
    if (code < 0) {  // for every thread of the thread block; each warp searches all codewords
      code = static_cast<int>(nearest(residual, 1, codewords, k, d, true));
      __syncthreads();
    }
    double error = 0;  // all threads have passed a barrier since they read the residual
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
      const float value = residual[j], close = codewords[int64_t{code} * d + j];
      const float quantized = rounded<T>(close);
      const double difference = static_cast<double>(value) - static_cast<double>(close);
      error += difference * difference;
      sum[j] = rounded<T>(sum[j] + quantized);
      residual[j] = rounded<T>(value - quantized);
    }
    error = block_sum(error);
    if (threadIdx.x == 0) indices[number] = code, wanted.errors[number * shape.outputs + output] = error;
  }
  for (int j = threadIdx.x; j < d; j += blockDim.x) narrow(sum[j], wanted.quantized[output * d + j]);
  grid_barrier();  // after it, all counts are zero and all errors are stored
  for (int number = threadIdx.x; number < wanted.stages; number += blockDim.x) {
    const RvqCodebook& stage = wanted.stage[number];
    add_to(stage.counts + codebook * stage.k + indices[number], 1);
    double error = 0;
    for (int64_t i = 0; blockIdx.x == 0 && i < shape.outputs; ++i)
      error += wanted.errors[number * shape.outputs + i];
    if (blockIdx.x == 0) wanted.losses[number] = static_cast<float>(error * wanted.factor);
  }
}

}  // namespace
}  // namespace uefl::cuda
