// vq_assign on CUDA: the index of the nearest codeword of every segment of every row, exactly. Not run on a GPU yet.
//
// As on the CPU (cpu/vq_assign.h), and with the notation of common/certificate.h:
//   pack     the codebook, once per call: float64 codewords for the definition, b = c - mu and |b|^2 / 2 for the scores
//   search   tiles of rows against all codewords in float32, best and second best kept in registers, never a score in memory;
//            a row whose gap is not above twice the error bound gets -1, or for "fast" one whose scores may overflow
//            (vq_assign_tensor.h takes this pass to the tensor cores where it can, and leaves to this one what it is not sure of)
//   rescore  each -1 by the definition, in float64 without contraction to FMA
// There is nothing to wait for between them: the flags are in the output. So a call may be captured in a CUDA graph.
//
// One output is one segment of one row: output o = row * segments + segment. With one shared codebook (books = 1) all outputs form
// one search; with a codebook per segment (books = segments) output m * books + book is row m of the search of that book.
#pragma once

#include <cstdint>

#include "common/certificate.h"
#include "cuda/tail.h"

namespace uefl::cuda {
namespace {

// A block of 16 x 16 threads scores kRows rows against kCodes codewords, kElements at a time; a thread has 8 x 4 of the scores.
constexpr int kRows = 128, kCodes = 64, kElements = 16;
constexpr int kThreadRows = kRows / 16, kThreadCodes = kCodes / 16;

// The packed codebook. A codeword with a NaN or an infinity is NaN throughout, and no comparison lets it win.
struct Packed {
  double* exact;      // [books, d, padded_k] codewords, of length one for cosine
  double* bounds;     // [books, 2] the largest |b|^2 / 2 (0 for cosine) and the largest |b|
  float* codes;       // [books, d, padded_k] b, zero where there is no codeword
  float* half_norms;  // [books, padded_k] |b|^2 / 2 (0 for cosine), infinity where there is no codeword
  float* mean;        // [books, d] mu: the mean of the finite codewords, 0 for cosine
};

// One warp per codeword: to float64, to unit length for cosine, transposed. Norms are summed in the order of the elements.
template <class T>
__global__ void pack_exact(const T* codebook, Shape shape, Packed packed) {
  const int64_t code = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (code >= shape.books * shape.k) return;
  const T* source = codebook + code * shape.d;
  double* target = packed.exact + code / shape.k * shape.d * shape.padded_k + code % shape.k;
  bool finite = true;
  double square = 0;
  for (int64_t start = 0; start < shape.d; start += kWarp) {
    const double value = start + lane < shape.d ? static_cast<double>(widen(source[start + lane])) : 0;
    finite = finite && isfinite(value);
    if (shape.euclidean) continue;
    for (int other = 0; other < kWarp; ++other) {
      const double element = __shfl_sync(kAllLanes, value, other);
      square = __dadd_rn(square, __dmul_rn(element, element));
    }
  }
  finite = __all_sync(kAllLanes, finite);
  const double norm = __dsqrt_rn(square);
  for (int64_t j = lane; j < shape.d; j += kWarp) {
    double value = static_cast<double>(widen(source[j]));
    if (!shape.euclidean) value = norm > 0 ? __ddiv_rn(value, norm) : 0;
    target[j * shape.padded_k] = finite ? value : nan("");
  }
}

// One warp per element of a book: the mean over its codewords, and what is left of them.
__global__ void pack_centred(Shape shape, Packed packed) {
  const int64_t element = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (element >= shape.books * shape.d) return;
  const double* exact = packed.exact + element * shape.padded_k;
  double sum = 0;
  int64_t count = 0;
  for (int64_t k = lane; k < shape.k; k += kWarp) {
    if (isnan(exact[k])) continue;
    sum += exact[k];
    ++count;
  }
  sum = warp_sum(sum);
  count = warp_sum(count);
  const float mean = shape.euclidean && count > 0 ? static_cast<float>(sum / static_cast<double>(count)) : 0;
  if (lane == 0) packed.mean[element] = mean;
  if (element % shape.d == 0 && lane < 2) packed.bounds[element / shape.d * 2 + lane] = 0;
  for (int64_t k = lane; k < shape.padded_k; k += kWarp) {
    packed.codes[element * shape.padded_k + k] = k < shape.k ? static_cast<float>(exact[k] - mean) : 0;
  }
}

// One thread per codeword: its norm, and the largest ones of the book. Doubles that are not negative order as their bits do.
__global__ void pack_norms(Shape shape, Packed packed) {
  const int64_t code = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (code >= shape.books * shape.padded_k) return;
  const int64_t book = code / shape.padded_k, k = code % shape.padded_k;
  if (k >= shape.k) {
    packed.half_norms[code] = INFINITY;
    return;
  }
  const double* exact = packed.exact + book * shape.d * shape.padded_k + k;
  double square = 0;
  for (int64_t j = 0; j < shape.d; ++j) {
    const double value = exact[j * shape.padded_k] - packed.mean[book * shape.d + j];
    square += value * value;
  }
  const double half_norm = shape.euclidean ? square / 2 : 0;
  packed.half_norms[code] = static_cast<float>(half_norm);
  if (isnan(square)) return;
  auto* bounds = reinterpret_cast<unsigned long long*>(packed.bounds + 2 * book);
  atomicMax(bounds, __double_as_longlong(half_norm));
  atomicMax(bounds + 1, __double_as_longlong(sqrt(square)));
}

// The best so far, and the second best score; NaN never enters, ties go to the lower index.
struct TopTwo {
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

// Elements [start, start + kElements) of the tile's rows, less the mean, transposed. Neighbouring threads take what lies side by side.
template <class T>
__device__ void load_rows(const T* x, const Shape& shape, const int64_t* begin, const float* mean, int64_t start,
                          float (*tile)[kRows + 4]) {
  for (int i = threadIdx.x; i < kRows * kElements; i += kThreads) {
    const int row = shape.stride == 1 ? i / kElements : i % kRows, j = shape.stride == 1 ? i % kElements : i / kRows;
    const bool inside = begin[row] >= 0 && start + j < shape.d;
    tile[j][row] = inside ? static_cast<float>(widen(x[begin[row] + (start + j) * shape.stride]) - mean[start + j]) : 0;
  }
}

// All outputs, or those on the list of a first pass: listed [books, outputs / books], of which counts [books] are there.
struct Selection {
  const int64_t* listed = nullptr;
  const long long* counts = nullptr;

  __device__ int64_t count(const Shape& shape, int64_t book) const { return counts ? counts[book] : shape.outputs / shape.books; }
  __device__ int64_t output(const Shape& shape, int64_t book, int64_t m) const {
    return listed ? listed[book * (shape.outputs / shape.books) + m] : m * shape.books + book;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    search(const T* x, Shape shape, Packed packed, bool exact, int64_t* indices, Selection selection) {
  __shared__ __align__(16) float rows[kElements][kRows + 4];  // + 4: fewer bank conflicts, still aligned
  __shared__ __align__(16) float codes[kElements][kCodes];
  __shared__ int64_t begin[kRows];
  __shared__ double squares[kRows];
  const int thread = threadIdx.x, column = thread % 16 * kThreadCodes;
  const int64_t tiles = (shape.outputs / shape.books + kRows - 1) / kRows * shape.books;

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t book = tile % shape.books, first_row = tile / shape.books * kRows, count = selection.count(shape, book);
    if (first_row >= count) continue;
    const float* mean = packed.mean + book * shape.d;
    if (thread < kRows) {
      const int64_t m = first_row + thread;
      begin[thread] = m < count ? shape.begin(selection.output(shape, book, m)) : -1;
    }
    TopTwo top[kThreadRows];
    double square = 0;
    for (int64_t first = 0; first < shape.padded_k; first += kCodes) {
      float dot[kThreadRows][kThreadCodes] = {};
      for (int64_t start = 0; start < shape.d; start += kElements) {
        __syncthreads();
        load_rows(x, shape, begin, mean, start, rows);
        const int j = thread / 16;
        const float4* source =
            reinterpret_cast<const float4*>(packed.codes + (book * shape.d + start + j) * shape.padded_k + first + column);
        *reinterpret_cast<float4*>(&codes[j][column]) = start + j < shape.d ? *source : float4{};
        __syncthreads();
        if (first == 0 && thread < kRows) {
          for (int j = 0; j < kElements; ++j) square += static_cast<double>(rows[j][thread]) * rows[j][thread];
        }
        UEFL_UNROLL
        for (int j = 0; j < kElements; ++j) {
          const float4 low = *reinterpret_cast<const float4*>(&rows[j][thread / 16 * 4]);
          const float4 high = *reinterpret_cast<const float4*>(&rows[j][kRows / 2 + thread / 16 * 4]);
          const float4 code = *reinterpret_cast<const float4*>(&codes[j][column]);
          const float y[kThreadRows] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
          const float b[kThreadCodes] = {code.x, code.y, code.z, code.w};
          UEFL_UNROLL
          for (int r = 0; r < kThreadRows; ++r) {
            UEFL_UNROLL
            for (int c = 0; c < kThreadCodes; ++c) dot[r][c] = fmaf(y[r], b[c], dot[r][c]);
          }
        }
      }
      UEFL_UNROLL
      for (int c = 0; c < kThreadCodes; ++c) {
        const int code = static_cast<int>(first) + column + c;
        const float half_norm = packed.half_norms[book * shape.padded_k + code];
        UEFL_UNROLL
        for (int r = 0; r < kThreadRows; ++r) top[r].add(half_norm - dot[r][c], code);
      }
    }
    if (thread < kRows) squares[thread] = square;
    __syncthreads();
    TopTwo found;  // of the row that this thread answers for, one for eight of sixteen threads
    UEFL_UNROLL
    for (int r = 0; r < kThreadRows; ++r) {
      UEFL_UNROLL
      for (int step = 8; step > 0; step /= 2) {  // over the 16 threads that share the row
        top[r].merge(__shfl_xor_sync(kAllLanes, top[r].best, step), __shfl_xor_sync(kAllLanes, top[r].second, step),
                     __shfl_xor_sync(kAllLanes, top[r].index, step));
      }
      if (thread % 16 == r) found = top[r];
    }
    const int r = thread % 16, row = r / 4 * (kRows / 2) + thread / 16 * 4 + r % 4;
    const bool there = r < kThreadRows && first_row + row < count;
    const int64_t output = there ? selection.output(shape, book, first_row + row) : -1;
    if (there) {
      const double error = score_error(shape.d, packed.bounds[2 * book], packed.bounds[2 * book + 1], squares[row], shape.euclidean);
      const bool certain = exact ? static_cast<double>(found.second) - found.best > 2 * error : error < INFINITY;
      indices[output] = certain ? found.index : -1;
    }
    __syncthreads();
  }
}

// The definition, by one warp: each lane takes every 32nd codeword, all lanes return the index.
template <class T>
__device__ int64_t nearest(const T* row, const double* exact, const Shape& shape) {
  double best = INFINITY;
  int64_t index = 0;
  for (int64_t k = threadIdx.x % kWarp; k < shape.k; k += kWarp) {
    double total = 0;
    for (int64_t j = 0; j < shape.d; ++j) {
      const double value = static_cast<double>(widen(row[j * shape.stride])), code = exact[j * shape.padded_k + k];
      const double difference = __dsub_rn(value, code);
      total = shape.euclidean ? __dadd_rn(total, __dmul_rn(difference, difference)) : __dsub_rn(total, __dmul_rn(value, code));
    }
    if (total < best) best = total, index = k;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const double other_best = __shfl_xor_sync(kAllLanes, best, step);
    const int64_t other_index = __shfl_xor_sync(kAllLanes, index, step);
    if (other_best < best || (other_best == best && other_index < index)) best = other_best, index = other_index;
  }
  return index;
}

// A warp looks at 32 outputs at a time and works together on each flagged one.
template <class T>
__global__ void rescore(const T* x, Shape shape, Packed packed, int64_t* indices) {
  const int lane = threadIdx.x % kWarp;
  const int64_t first_warp = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp, warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  for (int64_t start = first_warp * kWarp; start < shape.outputs; start += warps * kWarp) {
    unsigned flagged = __ballot_sync(kAllLanes, start + lane < shape.outputs && indices[start + lane] < 0);
    for (; flagged != 0; flagged &= flagged - 1) {
      const int64_t output = start + __ffs(flagged) - 1;
      const int64_t book = output % shape.segments % shape.books;
      const int64_t index = nearest(x + shape.begin(output), packed.exact + book * shape.d * shape.padded_k, shape);
      if (lane == 0) indices[output] = index;
    }
  }
}

}  // namespace
}  // namespace uefl::cuda
