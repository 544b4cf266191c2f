// What follows the search in vq and in a step of k-means, for the rows of a tile as soon as their codewords are known: x is read again
// while it is in the cache, so device memory sees it once. Not run on a GPU yet.
//
// The first pass of a search hands its rows over by Tail::finish, 32 to a warp at most. What it is not certain of it marks as open;
// finish_open does the same for those few rows when the passes that follow have settled them. What many rows add to is an integer, and
// every warp has a place of its own for its part of the loss: neither the order of the rows nor who was certain of them changes a bit
// of the sums, and runs do not differ in the loss.
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
  // What is added for a row: x in units of its codeword; for k-means (x - middle) * weight in units of each column.
  long long* sums;       // [codes, d], zeroed
  const double* scales;  // [codes], or [d] where there is a middle: units in 1.0
  const double* middle;  // [d], or null
  long long* largest;    // [codes], zeroed: the largest |x| of the rows, as the bits of a double; infinity for what is not finite
  unsigned char* open;   // [outputs] 1 for what the first pass left open; null where it leaves nothing

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

// An element of a row that a warp finishes.
struct Element {
  int64_t at, output, code, j;  // in x; the row; of all the codewords of all books; of d
};

template <class T>
__device__ inline void finish_element(const Tail& tail, const Shape& shape, const Element& element, T x, double target, double& error) {
  const double value = static_cast<double>(widen(x));
  if (tail.quantized) {
    narrow(target, static_cast<T*>(tail.quantized)[element.output * shape.d + element.j]);
    error += (value - target) * (value - target);
  }
  if (tail.largest) {  // it only grows, so an old value costs an addition at most
    const double magnitude = fabs(value) < INFINITY ? fabs(value) : INFINITY;
    if (__double_as_longlong(magnitude) > tail.largest[element.code]) {
      atomicMax(reinterpret_cast<unsigned long long*>(tail.largest + element.code), __double_as_longlong(magnitude));
    }
  }
  if (tail.sums) {
    double term = tail.middle ? value - tail.middle[element.j] : value;
    if (tail.weights) term *= tail.weights[element.output];
    term *= tail.middle ? tail.scales[element.j] : tail.scales[element.code];
    add(tail.sums + element.code * shape.d + element.j, __double2ll_rn(term));
  }
}

// Every lane of a warp calls it and brings one output at most (or -1), its index and whether that is certain; place: whose part of the
// loss this is. Consecutive lanes take consecutive elements, of one row after the other, so that short rows fill the warp too.
template <class T>
__device__ __noinline__ void finish(const Tail& tail, const T* x, const Shape& shape, int64_t book, int64_t output, int64_t index,
                                    bool certain, int64_t place) {
  constexpr int kBatch = 4;  // elements of a lane under way
  const int lane = threadIdx.x % kWarp;
  if (tail.open && output >= 0) tail.open[output] = !certain;
  const bool mine = output >= 0 && certain;
  const int64_t code = book * shape.k + index;
  if (mine) add(tail.counts + code, tail.mass_scale ? __double2ll_rn((tail.weights ? tail.weights[output] : 1) * *tail.mass_scale) : 1);

  // The i-th row to the i-th lane.
  const unsigned there = __ballot_sync(kAllLanes, mine);
  if (there == 0) return;
  int rows = 0, source = 0;
  for (unsigned left = there; left != 0; left &= left - 1, ++rows) {
    if (rows == lane) source = __ffs(left) - 1;
  }
  const int64_t row_output = __shfl_sync(kAllLanes, output, source), row_code = __shfl_sync(kAllLanes, code, source);
  const int64_t row_begin = lane < rows ? shape.begin(row_output) : 0;

  int64_t row = lane / shape.d, j = lane % shape.d;
  const int64_t row_step = kWarp / shape.d, step = kWarp % shape.d;
  double error = 0;
  for (int64_t done = 0; done < rows * shape.d; done += kBatch * kWarp) {
    Element elements[kBatch];
    T values[kBatch];
    double targets[kBatch];
    UEFL_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const int from = static_cast<int>(row < rows ? row : 0);
      Element& element = elements[i];
      element.output = __shfl_sync(kAllLanes, row_output, from);
      element.code = __shfl_sync(kAllLanes, row_code, from);
      element.at = __shfl_sync(kAllLanes, row_begin, from) + j * shape.stride;
      element.j = row < rows ? j : -1;
      if (element.j >= 0) {
        const int64_t at = element.code * shape.d + j;
        values[i] = x[element.at];
        if (tail.quantized) targets[i] = tail.wide ? static_cast<const double*>(tail.codes)[at] : static_cast<const float*>(tail.codes)[at];
      }
      row += row_step, j += step;
      if (j >= shape.d) j -= shape.d, ++row;
    }
    UEFL_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if (elements[i].j >= 0) finish_element(tail, shape, elements[i], values[i], targets[i], error);
    }
  }
  if (!tail.errors) return;
  error = warp_sum(error);
  if (lane == 0) tail.errors[place] = error;
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
    finish(closed, x, shape, book, open ? output : -1, open ? indices[output] : 0, true, first_pass_places(shape) + group);
  }
}

}  // namespace
}  // namespace uefl::cuda
