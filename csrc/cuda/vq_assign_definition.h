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

struct Nearest {
  double best = INFINITY;
  int64_t index = 0;

  __device__ void add(double other_best, int64_t other_index) {
    if (other_best < best || (other_best == best && other_index < index))
      best = other_best, index = other_index;
  }
  // Merges the results of kLanes adjacent lanes. Neighbors up to kSame have the same result.
  template <int kLanes, int kSame = 1>
  __device__ void merge() {
    for (int step = kLanes / 2; step >= kSame; step /= 2) {
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

// Returns four elements. Elements after the end are zero. whole: they are adjacent and aligned.
template <class T>
__device__ inline Four<T> four_of(const T* row, int64_t stride, int64_t j, int64_t d, bool whole) {
  if (whole) return load_four(row + j);
  Four<T> found{};
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (j + i < d) found.values[i] = row[(j + i) * stride];
  }
  return found;
}

// Returns the nearest of kOf codewords for each of kRows rows, by the definition. A warp calls it. The lanes
// are divided among the rows, and then among the codewords of a row. `code` is negative if there are fewer
// codewords. kAhead: loads of a lane in flight.
//
// First the lanes of a codeword sum the terms of its distance in float64. Their order is not the order of the
// definition, so such a sum differs from the defined one by at most 2 d 2^-53 times the sum of the
// magnitudes. Codewords that are closer to each other than this are compared by the definition.
template <int kOf, int kRows, int kAhead, class T>
__device__ int64_t nearest_of(const T* row, const Shape& shape, const double* codewords, int code) {
  constexpr int kRowLanes = kWarp / kRows, kLanes = kRowLanes / kOf;
  const int lane = threadIdx.x % kWarp;
  const int64_t d = shape.d, stride = shape.stride;
  const double* codeword = codewords + (code < 0 ? 0 : code) * d;
  const bool whole = stride == 1 && d % 4 == 0 && reinterpret_cast<uintptr_t>(row) % sizeof(Four<T>) == 0;
  double total = 0, size = 0;
  for (int64_t first = lane % kLanes * 4; first < d; first += kLanes * 4 * kAhead) {
    Four<T> values[kAhead] = {};
    Four<double> others[kAhead] = {};
    UEFL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int64_t j = first + i * kLanes * 4;
      if (j >= d) break;
      values[i] = four_of(row, stride, j, d, whole);
      others[i] = four_of(codeword, 1, j, d, d % 4 == 0);
    }
    UEFL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      UEFL_UNROLL
      for (int e = 0; e < 4; ++e) {
        const double value = static_cast<double>(widen(values[i].values[e])), other = others[i].values[e],
                     difference = __dsub_rn(value, other),
                     term = shape.euclidean ? __dmul_rn(difference, difference) : __dmul_rn(value, other);
        total += shape.euclidean ? term : -term, size += fabs(term);
      }
    }
  }
  UEFL_UNROLL
  for (int step = 1; step < kLanes; step *= 2) {
    total += __shfl_xor_sync(kAllLanes, total, step), size += __shfl_xor_sync(kAllLanes, size, step);
  }
  const unsigned own = (kAllLanes >> (kWarp - kRowLanes))
                       << lane / kRowLanes * kRowLanes;  // lanes of the row
  Nearest found;
  if (code >= 0 && total < INFINITY) found = {total, code};
  found.merge<kRowLanes, kLanes>();
  const double error = size * static_cast<double>(d) * 0x1.1p-52;
  const unsigned best = __ballot_sync(kAllLanes, code == found.index) & own;
  const double limit = found.best + __shfl_sync(kAllLanes, error, best == 0 ? 0 : __ffs(best) - 1);
  const bool apart = best != 0 && (code < 0 || code == found.index || total - error > limit);
  const unsigned close = __ballot_sync(kAllLanes, !apart);
  if (close == 0) return found.index;
  Nearest exact;
  if (code >= 0 && lane % kLanes == 0 && (close & own) != 0)
    exact.add(distance(row, stride, codeword, d, shape.euclidean), code);
  exact.merge<kRowLanes>();
  return (close & own) != 0 ? exact.index : found.index;
}

}  // namespace
}  // namespace uefl::cuda
