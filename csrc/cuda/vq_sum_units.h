// The units of the sums of vq, in two launches around row_sums.h. Each codeword has a unit, because its rows
// are summed as 64-bit integers. A unit is first chosen for rows up to eight times as large as the codeword.
// If the rows turn out too large or too small for it, they are summed again in another unit. At the end, the
// sums become float64. The bits are the same as in ops/vq/composed.py, which explains the units.
#pragma once

#include <cstdint>

#include "cuda/grid.h"
#include "cuda/rows.h"
#include "cuda/sums.h"

namespace uefl::cuda {
namespace {

constexpr int kUnitBlocks = 4;    // largest number of thread blocks on a multiprocessor
constexpr int kUnitRoom = 3;      // powers of two between a codeword and the largest expected row
constexpr int kUnitBits = 31;     // bits that remain of the largest value of a codeword's rows
constexpr int kUnitLeast = -900;  // least exponent of a value

// Returns the bits of each row that add up within 2^62.
inline int digits_of(int64_t rows) {
  int bits = 0;
  while (int64_t{1} << bits < rows) ++bits;
  return 62 - bits;
}

struct SumUnits {
  int digits;
  int64_t codewords;         // of all codebooks
  double* scales;            // [codewords]: units in 1.0, powers of two; negative: rows are summed again
  const int64_t* indices;    // [outputs]
  const long long* largest;  // [codewords] as in RowSums
  long long* sums;           // [codewords, d]: becomes the bits of float64
  long long* again;          // [1], zeroed: 1 if rows are summed again
};

__device__ inline double unit_of(int exponent) { return __longlong_as_double((exponent + 1023ll) << 52); }
__device__ inline int exponent_of(double scale) {
  return static_cast<int>(__double_as_longlong(scale) >> 52) - 1023;
}
// Returns the least exponent e with value < 2^e, for a finite value that is not negative. It is 0 for 0.
__device__ inline int reach_exponent(double value) {
  const int exponent = exponent_of(value) + 1;
  return value == 0 ? 0 : exponent < kUnitLeast ? kUnitLeast : exponent;
}

// Chooses the units that the codewords let expect, with one warp for each codeword. A codeword that is not
// finite counts as zero.
template <class Codeword>
__global__ void __launch_bounds__(kThreads)
    expect_units(const Codeword* codebook, int64_t d, const __grid_constant__ SumUnits wanted) {
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  for (int64_t code = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp; code < wanted.codewords;
       code += warps) {
    double most = 0;
    for (int64_t j = threadIdx.x % kWarp; j < d; j += kWarp) {
      const double size = fabs(static_cast<double>(codebook[code * d + j]));
      most = size < INFINITY ? fmax(most, size) : INFINITY;
    }
    for (int step = kWarp / 2; step > 0; step /= 2) most = fmax(most, __shfl_xor_sync(kAllLanes, most, step));
    if (threadIdx.x % kWarp == 0)
      wanted.scales[code] = unit_of(wanted.digits - reach_exponent(most < INFINITY ? most : 0) - kUnitRoom);
  }
}

// Chooses another unit for each codeword whose rows need one, with one warp for each codeword.
__device__ inline void change_units(int64_t d, const SumUnits& wanted, int64_t warp, int64_t warps) {
  for (int64_t code = warp; code < wanted.codewords; code += warps) {
    const double most = __longlong_as_double(wanted.largest[code]);
    if (!(most < INFINITY)) continue;
    const int expected = exponent_of(wanted.scales[code]), needed = wanted.digits - reach_exponent(most),
              spare = needed - expected;
    if (spare == 0 || (0 < spare && spare <= wanted.digits - kUnitBits)) continue;
    for (int64_t j = threadIdx.x % kWarp; j < d; j += kWarp) wanted.sums[code * d + j] = 0;
    __syncwarp();  // all lanes have read the old unit
    if (threadIdx.x % kWarp == 0) wanted.scales[code] = -unit_of(needed), *wanted.again = 1;
  }
}

// Ends the sums. The launch is cooperative, with at most kUnitBlocks thread blocks on a multiprocessor.
template <class T>
__global__ void __launch_bounds__(kThreads, kUnitBlocks)
    finish_sums(const T* x, const __grid_constant__ Shape shape, const __grid_constant__ SumUnits wanted) {
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x,
                threads = int64_t{gridDim.x} * blockDim.x;
  change_units(shape.d, wanted, thread / kWarp, threads / kWarp);
  grid_barrier();
  if (*wanted.again != 0) {  // the same in all thread blocks: nothing writes it any more
    for (int64_t output = thread / kWarp; output < shape.outputs; output += threads / kWarp) {
      const int64_t code = code_of(shape, wanted.indices, output);
      const double scale = wanted.scales[code];
      const T* row = x + shape.begin(output);
      for (int64_t j = threadIdx.x % kWarp; j < shape.d && scale < 0; j += kWarp)
        add_to(wanted.sums + code * shape.d + j,
               __double2ll_rn(static_cast<double>(widen(row[j * shape.stride])) * -scale));
    }
    grid_barrier();
  }
  for (int64_t i = thread; i < wanted.codewords * shape.d; i += threads) {
    const int64_t code = i / shape.d;
    const bool finite = __longlong_as_double(wanted.largest[code]) < INFINITY;
    const auto sum = static_cast<double>(wanted.sums[i]);
    wanted.sums[i] =
        __double_as_longlong(finite ? sum * unit_of(-exponent_of(fabs(wanted.scales[code]))) : double{NAN});
  }
}

}  // namespace
}  // namespace uefl::cuda
