// The definition of vq_assign on CUDA, for the rows that a search in lower precision leaves open. It sums in
// float64, in the order of the elements, without contraction to FMA. Ties go to the lowest index.
#pragma once

#include "cuda/vq_assign_pack.h"

namespace uefl::cuda {
namespace {

// Returns the distance between a row and one codeword, or NaN if it is not finite. Loads of kAhead elements
// run ahead of the sum. The order of the sum is fixed.
template <int kAhead = 8, class T, class Codeword>
__device__ double distance(const T* row, int64_t stride, const Codeword* codeword, int64_t d,
                           bool euclidean) {
  double total = 0;
  for (int64_t start = 0; start < d; start += kAhead) {
    double values[kAhead], codewords[kAhead];
    UEFL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int64_t j = start + i < d ? start + i : start;
      values[i] = static_cast<double>(widen(row[j * stride])),
      codewords[i] = static_cast<double>(codeword[j]);
    }
    UEFL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (start + i >= d) break;
      const double difference = __dsub_rn(values[i], codewords[i]);
      total = euclidean ? __dadd_rn(total, __dmul_rn(difference, difference))
                        : __dsub_rn(total, __dmul_rn(values[i], codewords[i]));
    }
  }
  return total;
}

// Returns the same for a row of adjacent elements that begins at a multiple of 16 bytes and has whole pieces of
// 16 bytes. More loads run ahead of the sum.
template <class T>
__device__ double distance_in_pieces(const T* row, const double* codeword, int64_t d, bool euclidean) {
  constexpr int kPiece = 16 / sizeof(T), kAhead = 16;
  double total = 0;
  for (int64_t start = 0; start < d; start += kAhead) {
    Piece<T, kPiece> values[kAhead / kPiece];
    Piece<double, 2> codewords[kAhead / 2];
    UEFL_UNROLL
    for (int i = 0; i < kAhead; i += 2) {
      const int64_t at = start + i < d ? start + i : start;
      if (i % kPiece == 0) values[i / kPiece] = *reinterpret_cast<const Piece<T, kPiece>*>(row + at);
      codewords[i / 2] = *reinterpret_cast<const Piece<double, 2>*>(codeword + at);
    }
    UEFL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (start + i >= d) break;
      const auto value = static_cast<double>(widen(values[i / kPiece].values[i % kPiece]));
      const double other = codewords[i / 2].values[i % 2], difference = __dsub_rn(value, other);
      total = euclidean ? __dadd_rn(total, __dmul_rn(difference, difference))
                        : __dsub_rn(total, __dmul_rn(value, other));
    }
  }
  return total;
}

struct Nearest {
  double best = INFINITY;
  int64_t index = 0;

  __device__ void add(double other_best, int64_t other_index) {
    if (other_best < best || (other_best == best && other_index < index))
      best = other_best, index = other_index;
  }
  // Merges the results of kLanes adjacent lanes.
  template <int kLanes>
  __device__ void merge() {
    for (int step = kLanes / 2; step > 0; step /= 2) {
      add(__shfl_xor_sync(kAllLanes, best, step), __shfl_xor_sync(kAllLanes, index, step));
    }
  }
};

// Returns the index of the nearest of k codewords. Each lane of a warp takes every 32nd codeword, and all
// lanes get the index.
template <class T, class Codeword>
__device__ int64_t nearest(const T* row, int64_t stride, const Codeword* codewords, int64_t k, int64_t d,
                           bool euclidean) {
  Nearest found;
  for (int64_t code = threadIdx.x % kWarp; code < k; code += kWarp) {
    const double total = distance(row, stride, codewords + code * d, d, euclidean);
    if (total < found.best) found.best = total, found.index = code;
  }
  found.merge<kWarp>();
  return found.index;
}

}  // namespace
}  // namespace uefl::cuda
