// The inner loops of k-means on sparse rows.
#include "cpu/kmeans_sparse_kernel.h"
#include "cpu/simd.h"
#include "cpu/variant.h"

namespace uefl::cpu {
namespace {

constexpr int kTogether = 8;  // vectors of sums that stay in registers

// Computes the products of a row and of kVectors vectors of centers, which begin at `centers`.
template <class T, int kVectors>
UEFL_INLINE void some_products(const T* values, const int32_t* columns, int64_t count, const double* centers,
                               int64_t pitch, double* out) {
  Doubles sums[kVectors] = {}, center;
  for (int64_t i = 0; i < count; ++i) {
    const double value = static_cast<double>(values[i]);
    const double* column = centers + columns[i] * pitch;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      load(column + v * kDoubles, center);
      sums[v] += center * value;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(sums[v], out + v * kDoubles);
}

template <class T>
void products_typed(const SparseRow& row, const double* centers, int64_t pitch, double* out) {
  const T* values = reinterpret_cast<const T*>(row.values);
  int64_t k = 0;
  const auto next = [&]<int kVectors>() {
    for (; k + kVectors * kDoubles <= pitch; k += kVectors * kDoubles)
      some_products<T, kVectors>(values, row.columns, row.count, centers + k, pitch, out + k);
  };
  next.template operator()<kTogether>();
  next.template operator()<kTogether / 2>();
  next.template operator()<kTogether / 4>();
  next.template operator()<kTogether / 8>();
}

void products(const SparseRow& row, const double* centers, int64_t pitch, double* out) {
  row.wide ? products_typed<double>(row, centers, pitch, out)
           : products_typed<float>(row, centers, pitch, out);
}

SparseTopTwo top_two(const double* products, const double* half_norms, int64_t pitch) {
  Doubles best = Doubles{} + __builtin_inf(), second = best, index{}, number, product, score;
  for (int i = 0; i < kDoubles; ++i) number[i] = i;
  for (int64_t k = 0; k < pitch; k += kDoubles, number += kDoubles) {
    load(products + k, product);
    load(half_norms + k, score);
    score -= product;
    const auto nearer = score < best;
    const Doubles other = nearer ? best : score;
    second = other < second ? other : second;
    best = nearer ? score : best;
    index = nearer ? number : index;
  }
  SparseTopTwo found{best[0], second[0], static_cast<int64_t>(index[0])};
  for (int i = 1; i < kDoubles; ++i) {
    const bool nearer = best[i] < found.best;
    const double other = nearer ? found.best : best[i], least = other < second[i] ? other : second[i];
    found.second = least < found.second ? least : found.second;
    if (nearer) found.best = best[i], found.index = static_cast<int64_t>(index[i]);
  }
  return found;
}

template <class T>
double square_typed(const SparseRow& row) {
  constexpr int kSums = 8;
  const T* values = reinterpret_cast<const T*>(row.values);
  Doubles sums[kSums / kDoubles] = {}, value;
  int64_t i = 0;
  for (; i + kSums <= row.count; i += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kSums / kDoubles; ++part) {
      widen(values + i + part * kDoubles, value);
      sums[part] += value * value;
    }
  }
  double total[kSums];
  __builtin_memcpy(total, sums, sizeof total);
  for (int j = 0; i < row.count; ++i, ++j) {
    const double last = static_cast<double>(values[i]);
    total[j] += last * last;
  }
  return ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
}

double square(const SparseRow& row) {
  return row.wide ? square_typed<double>(row) : square_typed<float>(row);
}

int64_t falls(const int32_t* columns, int64_t count) {
  Ints found{}, before, after;
  int64_t i = 1;
  for (; i + kLanes <= count; i += kLanes) {
    load(columns + i - 1, before);
    load(columns + i, after);
    found -= (Ints)(after <= before);  // true is -1
  }
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += found[lane];
  for (; i < count; ++i) total += columns[i] <= columns[i - 1];
  return total;
}

}  // namespace

const KMeansSparseKernel UEFL_VARIANT(kmeans_sparse){products, top_two, square, falls};

}  // namespace uefl::cpu
