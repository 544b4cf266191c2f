// vq_assign in float32, without tensor cores: for codewords too long for the shared memory of the other
// searches, and to compare with (UEFL_CUDA_SEARCH=float32).
//
//   search_float32  scores tiles of rows against all codewords. The best and the second-best score stay in
//                   registers, and no score goes to memory. A row gets -1 if the gap of its scores is not
//                   above twice the error bound; with "fast", only if its scores may overflow
//   rescore         decides each -1 by the definition
#pragma once

#include "cuda/vq_assign_definition.h"

namespace uefl::cuda {
namespace {

// A block of 16 x 16 threads scores kRows rows against kCodewords codewords, kElements at a time; a thread
// has 8 x 4 of the scores.
constexpr int kRows = 128, kCodewords = 64, kElements = 16;
constexpr int kThreadRows = kRows / 16, kThreadCodewords = kCodewords / 16;

// The best so far, and the second best score; NaN never enters, ties go to the lower index.
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

// Elements [start, start + kElements) of the tile's rows, less the center, transposed. Neighboring threads
// read adjacent elements.
template <class T>
__device__ void load_rows(const T* x, const Shape& shape, const int64_t* begin, const float* center,
                          int64_t start, float (*tile)[kRows + 4]) {
  for (int i = threadIdx.x; i < kRows * kElements; i += kThreads) {
    const int row = shape.stride == 1 ? i / kElements : i % kRows,
              j = shape.stride == 1 ? i % kElements : i / kRows;
    const bool inside = begin[row] >= 0 && start + j < shape.d;
    tile[j][row] =
        inside ? static_cast<float>(widen(x[begin[row] + (start + j) * shape.stride]) - center[start + j])
               : 0;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    search_float32(const T* x, Shape shape, Packed packed, bool exact, int64_t* indices) {
  __shared__ __align__(16) float rows[kElements][kRows + 4];  // + 4: fewer bank conflicts, still aligned
  __shared__ __align__(16) float codewords[kElements][kCodewords];
  __shared__ int64_t begin[kRows];
  __shared__ double squares[kRows];
  const int thread = threadIdx.x, column = thread % 16 * kThreadCodewords;
  const int64_t tiles = (shape.outputs / shape.books + kRows - 1) / kRows * shape.books;

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t book = tile % shape.books, first_row = tile / shape.books * kRows,
                  count = shape.outputs / shape.books;
    const float* center = packed.center + book * shape.d;
    if (thread < kRows) {
      const int64_t m = first_row + thread;
      begin[thread] = m < count ? shape.begin(m * shape.books + book) : -1;
    }
    FloatTopTwo top[kThreadRows];
    double square = 0;
    for (int64_t first = 0; first < shape.padded_k; first += kCodewords) {
      float dot[kThreadRows][kThreadCodewords] = {};
      for (int64_t start = 0; start < shape.d; start += kElements) {
        __syncthreads();
        load_rows(x, shape, begin, center, start, rows);
        const int j = thread / 16;
        const float4* source = reinterpret_cast<const float4*>(
            packed.codewords + (book * shape.d + start + j) * shape.padded_k + first + column);
        *reinterpret_cast<float4*>(&codewords[j][column]) = start + j < shape.d ? *source : float4{};
        __syncthreads();
        if (first == 0 && thread < kRows) {
          for (int j = 0; j < kElements; ++j)
            square += static_cast<double>(rows[j][thread]) * rows[j][thread];
        }
        UEFL_UNROLL
        for (int j = 0; j < kElements; ++j) {
          const float4 low = *reinterpret_cast<const float4*>(&rows[j][thread / 16 * 4]);
          const float4 high = *reinterpret_cast<const float4*>(&rows[j][kRows / 2 + thread / 16 * 4]);
          const float4 codeword = *reinterpret_cast<const float4*>(&codewords[j][column]);
          const float y[kThreadRows] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
          const float b[kThreadCodewords] = {codeword.x, codeword.y, codeword.z, codeword.w};
          UEFL_UNROLL
          for (int r = 0; r < kThreadRows; ++r) {
            UEFL_UNROLL
            for (int c = 0; c < kThreadCodewords; ++c) dot[r][c] = fmaf(y[r], b[c], dot[r][c]);
          }
        }
      }
      UEFL_UNROLL
      for (int c = 0; c < kThreadCodewords; ++c) {
        const int code = static_cast<int>(first) + column + c;
        const float half_norm = packed.half_norms[book * shape.padded_k + code];
        UEFL_UNROLL
        for (int r = 0; r < kThreadRows; ++r) top[r].add(half_norm - dot[r][c], code);
      }
    }
    if (thread < kRows) squares[thread] = square;
    __syncthreads();
    FloatTopTwo found;  // of this thread's row: eight of sixteen threads have one
    UEFL_UNROLL
    for (int r = 0; r < kThreadRows; ++r) {
      UEFL_UNROLL
      for (int step = 8; step > 0; step /= 2) {  // over the 16 threads that share the row
        top[r].merge(__shfl_xor_sync(kAllLanes, top[r].best, step),
                     __shfl_xor_sync(kAllLanes, top[r].second, step),
                     __shfl_xor_sync(kAllLanes, top[r].index, step));
      }
      if (thread % 16 == r) found = top[r];
    }
    const int r = thread % 16, row = r / 4 * (kRows / 2) + thread / 16 * 4 + r % 4;
    const bool there = r < kThreadRows && first_row + row < count;
    const int64_t output = there ? (first_row + row) * shape.books + book : -1;
    if (there) {
      const double error = score_error(shape.d, packed.bounds[4 * book], packed.bounds[4 * book + 1],
                                       squares[row], shape.euclidean);
      const bool certain =
          exact ? static_cast<double>(found.second) - found.best > 2 * error : error < INFINITY;
      indices[output] = certain ? found.index : -1;
    }
    __syncthreads();
  }
}

// A warp looks at 32 outputs at a time and works together on each flagged one.
template <class T>
__global__ void rescore(const T* x, Shape shape, Packed packed, int64_t* indices) {
  const int lane = threadIdx.x % kWarp;
  const int64_t first_warp = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp,
                warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  for (int64_t start = first_warp * kWarp; start < shape.outputs; start += warps * kWarp) {
    unsigned flagged = __ballot_sync(kAllLanes, start + lane < shape.outputs && indices[start + lane] < 0);
    for (; flagged != 0; flagged &= flagged - 1) {
      const int64_t output = start + __ffs(flagged) - 1;
      const int64_t book = output % shape.segments % shape.books;
      const int64_t index = nearest(x + shape.begin(output), shape, packed.exact + book * shape.k * shape.d);
      if (lane == 0) indices[output] = index;
    }
  }
}

}  // namespace
}  // namespace uefl::cuda
