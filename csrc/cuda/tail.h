// What follows the search in vq and in a step of k-means, for the rows of a tile as soon as their codewords are known: x is read again
// while it is in the cache, so device memory sees it once. Not run on a GPU yet.
//
// The first pass of a search hands its rows to finish(), 32 to a warp at most. What it is not certain of it marks as open;
// finish_open does the same for those few rows (all rows of a search in float32) when the passes that follow have settled them. What many
// rows add to is an integer, and every warp has a place of its own for its part of the loss: neither the order of the rows nor who was
// certain of them changes a bit of the sums, and runs do not differ in the loss.
//
// Bytes: x and quantized once each, and from the caches x, the codewords and, for sums, 8 bytes for each element of x: additions that the
// second-level cache performs on sectors of 32 bytes.
#pragma once

#include <cstdint>

#include "common/certificate.h"
#include "cuda/rows.h"

namespace uefl::cuda {

// What is wanted; all of it null for vq_assign. Rows of [outputs] are those of x, codewords of [codes] those of all books.
struct Tail {
  // vq: the codewords, float64 where wide, else float32; what takes the place of x; parts of the sum of the squares of their differences
  const void* codes;  // [codes, d]
  void* quantized;    // [outputs, d] in the dtype of x
  double* errors;     // [places(shape)], zeroed
  bool wide;
  // Rows of each codeword, or their mass: each one's weight (1 where there are none) times mass_scale, rounded.
  long long* counts;                   // [codes], zeroed
  const double *weights, *mass_scale;  // [outputs], [1]; k-means
  // What is added for a row: x in units of its codeword; for k-means, where nothing is gathered, (x - middle) * weight in units of each
  // column.
  long long* sums;       // [codes, d], zeroed
  const double* scales;  // [codes], or [d] for k-means: units in 1.0
  const double* middle;  // [d]
  // vq with sums: the largest |x| of the rows, as the bits of a double; infinity for what is not finite
  long long* largest;   // [codes], zeroed
  unsigned char* open;  // [outputs] 1 for what the first pass left open; null where it leaves nothing

  __device__ bool wanted() const { return counts != nullptr; }
};

namespace {

// Parts of the loss: one for every 16 rows of the search of a book in the first pass, then one for every 32 in finish_open.
UEFL_HOST_DEVICE inline int64_t first_pass_places(const Shape& shape) {
  return (shape.outputs / shape.books + 127) / 128 * 8 * shape.books;
}
UEFL_HOST_DEVICE inline int64_t places(const Shape& shape) {
  return first_pass_places(shape) + (shape.outputs / shape.books + kWarp - 1) / kWarp * shape.books;
}

__device__ inline void add(long long* target, long long value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(value));
}

// Rows of lanes [0, rows): an output and its codeword each. kGather: vq, else k-means. A row is shared by as many lanes as it fills, up to
// the warp, and every lane has kBatch rows under way.
template <class T, bool kGather, bool kSums>
__device__ void finish_rows(const Tail& wanted, const T* x, const Shape& shape, int rows, int64_t output, int64_t code, int64_t place) {
  constexpr int kBatch = sizeof(T) < sizeof(double) ? 2 : 1;  // more would spill
  const Tail tail = wanted;
  const int64_t d = shape.d, stride = shape.stride;
  const int lane = threadIdx.x % kWarp;
  int width = kWarp;
  while (width / 2 >= d) width /= 2;
  const int64_t begin = lane < rows ? shape.begin(output) : 0;
  double error = 0;
  for (int first = 0; first < rows; first += kBatch * kWarp / width) {
    bool there[kBatch];
    const T* row[kBatch];
    int64_t codeword[kBatch], target[kBatch];
    double factor[kBatch], peak[kBatch];  // factor: units of the codeword in 1.0, or the weight of the row
    UEFL_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const int number = first + (i * kWarp + lane) / width, from = number < rows ? number : 0;
      there[i] = number < rows;
      row[i] = x + __shfl_sync(kAllLanes, begin, from);
      codeword[i] = __shfl_sync(kAllLanes, code, from);
      target[i] = __shfl_sync(kAllLanes, output, from);
      factor[i] = kGather ? (kSums ? tail.scales[codeword[i]] : 0) : (tail.weights ? tail.weights[target[i]] : 1);
      peak[i] = 0;
    }
    for (int64_t j = lane % width; j < d; j += width) {
      T value[kBatch];
      double close[kBatch];
      UEFL_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (!there[i]) continue;
        value[i] = row[i][j * stride];
        const int64_t at = codeword[i] * d + j;
        if (kGather) close[i] = tail.wide ? static_cast<const double*>(tail.codes)[at] : static_cast<const float*>(tail.codes)[at];
      }
      UEFL_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (!there[i]) continue;
        const double exact = static_cast<double>(widen(value[i]));
        if (kGather) {
          narrow(close[i], static_cast<T*>(tail.quantized)[target[i] * d + j]);
          error += (exact - close[i]) * (exact - close[i]);
        }
        if (kGather && kSums) {
          const double magnitude = fabs(exact);
          peak[i] = !(magnitude < INFINITY) ? INFINITY : fmax(peak[i], magnitude);
        }
        if (kSums) {
          const double term = kGather ? exact * factor[i] : (exact - tail.middle[j]) * factor[i] * tail.scales[j];
          add(tail.sums + codeword[i] * d + j, __double2ll_rn(term));
        }
      }
    }
    UEFL_UNROLL
    for (int i = 0; i < kBatch; ++i) {  // the largest only grows, so to see an old one costs a comparison too many
      if (!(kGather && kSums) || !there[i] || __double_as_longlong(peak[i]) <= tail.largest[codeword[i]]) continue;
      atomicMax(reinterpret_cast<unsigned long long*>(tail.largest + codeword[i]), __double_as_longlong(peak[i]));
    }
  }
  if (!kGather) return;
  error = warp_sum(error);
  if (lane == 0) tail.errors[place] = error;
}

// Every lane of a warp calls it and brings one output of a book at most (or -1), its index and whether that is certain. The outputs of a
// warp are of 16 rows that begin at a multiple of 16, or of two such runs: hence its place. Not inlined, and of few arguments: the
// searches have no registers left.
template <class T, bool kLater = false>
__device__ __noinline__ void finish(const Tail& tail, const T* x, const Shape& shape, int64_t output, int64_t index, bool certain) {
  const int lane = threadIdx.x % kWarp;
  if (tail.open && output >= 0) tail.open[output] = !certain;
  const bool mine = output >= 0 && certain;
  const int64_t code = output % shape.books * shape.k + index;
  if (mine) add(tail.counts + code, tail.mass_scale ? __double2ll_rn((tail.weights ? tail.weights[output] : 1) * *tail.mass_scale) : 1);

  // The i-th row to the i-th lane.
  const unsigned there = __ballot_sync(kAllLanes, mine);
  int rows = 0, source = 0;
  for (unsigned left = there; left != 0; left &= left - 1, ++rows) {
    if (rows == lane) source = __ffs(left) - 1;
  }
  if (rows == 0) return;
  const int64_t row_output = __shfl_sync(kAllLanes, output, source), row_code = __shfl_sync(kAllLanes, code, source);
  const int64_t first = __shfl_sync(kAllLanes, row_output, 0), m = first / shape.books, book = first % shape.books;
  const int64_t place = kLater ? first_pass_places(shape) + m / kWarp * shape.books + book : m / 16 * shape.books + book;
  if (!tail.quantized) {
    finish_rows<T, false, true>(tail, x, shape, rows, row_output, row_code, place);
  } else if (tail.sums) {
    finish_rows<T, true, true>(tail, x, shape, rows, row_output, row_code, place);
  } else {
    finish_rows<T, true, false>(tail, x, shape, rows, row_output, row_code, place);
  }
}

// What the first pass left open, by now in indices. A warp takes 32 outputs of one book, and the places after those of the first pass.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    finish_open(const T* x, const __grid_constant__ Shape shape, Tail tail, const int64_t* indices) {
  const int lane = threadIdx.x % kWarp;
  const int64_t count = shape.outputs / shape.books, groups = (count + kWarp - 1) / kWarp * shape.books;
  const int64_t first = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp, warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  Tail closed = tail;
  closed.open = nullptr;
  for (int64_t group = first; group < groups; group += warps) {
    const int64_t book = group % shape.books, m = group / shape.books * kWarp + lane, output = m * shape.books + book;
    const bool open = m < count && tail.open[output] != 0;
    if (!__any_sync(kAllLanes, open)) continue;
    finish<T, true>(closed, x, shape, open ? output : -1, open ? indices[output] : 0, true);
  }
}

}  // namespace
}  // namespace uefl::cuda
