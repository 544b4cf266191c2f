// The inner loops of a k-means step.
#include "cpu/kmeans_kernel.h"
#include "cpu/simd.h"
#include "cpu/variant.h"

namespace uefl::cpu {
namespace {

template <class T>
inline const T* typed_row(const Dense& x, int64_t row) {
  return reinterpret_cast<const T*>(x.row(row));
}

template <class T>
bool range_typed(const Dense& x, int64_t lo, int64_t hi, double* low, double* high) {
  constexpr int64_t kTogether = 4;   // rows that share one read of the extremes
  constexpr int64_t kColumns = 256;  // columns of extremes that stay in the first-level cache
  bool finite = true;
  for (int64_t start = 0; start < x.d; start += kColumns) {
    const int64_t columns = x.d - start < kColumns ? x.d - start : kColumns;
    T least[kColumns], most[kColumns], zero[kColumns] = {};
    for (int64_t j = 0; j < columns; ++j) least[j] = most[j] = typed_row<T>(x, lo)[start + j];
    for (int64_t i = lo; i < hi; i += kTogether) {
      const auto row = [&](int64_t r) { return typed_row<T>(x, i + r < hi ? i + r : hi - 1) + start; };
      const T *a = row(0), *b = row(1), *c = row(2), *e = row(3);
      for (int64_t j = 0; j < columns; ++j) {
        const T ab_least = a[j] < b[j] ? a[j] : b[j], ce_least = c[j] < e[j] ? c[j] : e[j];
        const T ab_most = a[j] > b[j] ? a[j] : b[j], ce_most = c[j] > e[j] ? c[j] : e[j];
        const T all_least = ab_least < ce_least ? ab_least : ce_least,
                all_most = ab_most > ce_most ? ab_most : ce_most;
        least[j] = all_least < least[j] ? all_least : least[j];
        most[j] = all_most > most[j] ? all_most : most[j];
        zero[j] +=
            ((a[j] * 0 + b[j] * 0) + (c[j] * 0 + e[j] * 0));  // NaN from the first element that is not finite
      }
    }
    for (int64_t j = 0; j < columns; ++j) {
      finite = finite && zero[j] == 0;
      low[start + j] = least[j] < low[start + j] ? least[j] : low[start + j];
      high[start + j] = most[j] > high[start + j] ? most[j] : high[start + j];
    }
  }
  return finite;
}

// Left to the compiler: its own narrowing to 16 bits is faster.
template <class T>
void quantize_typed(const T* row, int64_t d, const Rounding& rounding, int16_t* values, int64_t* sums,
                    int64_t* squares) {
  for (int64_t j = 0; j < d; ++j) {
    const double value =
        __builtin_rint((static_cast<double>(row[j]) - rounding.middle[j]) * rounding.scale[j]);
    values[j] = static_cast<int16_t>(static_cast<int32_t>(value));
  }
  for (int64_t j = 0; j < d; ++j) {
    const int32_t value = values[j];
    sums[j] += value;
    squares[j] += value * value;
  }
}

template <class T, bool kWeighted>
void move_typed(const T* row, int64_t d, const Rounding& rounding, double weight, int64_t* to,
                int64_t* from) {
  int64_t j = 0;
  for (; j + kDoubles <= d; j += kDoubles) {
    Doubles value, middle, scale;
    widen(row + j, value);
    widen(rounding.middle + j, middle);
    widen(rounding.scale + j, scale);
    value -= middle;
    if (kWeighted) value *= weight;
    const SignedLongs units = rounded(value * scale);
    SignedLongs sum;
    load(to + j, sum);
    store(sum + units, to + j);
    if (from == nullptr) continue;
    load(from + j, sum);
    store(sum - units, from + j);
  }
  for (; j < d; ++j) {
    const double value = (static_cast<double>(row[j]) - rounding.middle[j]) * weight * rounding.scale[j];
    const int64_t units = static_cast<int64_t>(__builtin_rint(value));
    to[j] += units;
    if (from != nullptr) from[j] -= units;
  }
}

template <class T>
double distance_typed(const T* row, const T* center, int64_t d) {
  constexpr int kSums = 8;  // the same on every instruction set, so that all add in the same order
  Doubles sums[kSums / kDoubles] = {}, value, other;
  int64_t j = 0;
  for (; j + kSums <= d; j += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kSums / kDoubles; ++part) {
      widen(row + j + part * kDoubles, value);
      widen(center + j + part * kDoubles, other);
      const Doubles difference = value - other;
      sums[part] += difference * difference;
    }
  }
  double total[kSums];
  __builtin_memcpy(total, sums, sizeof total);
  for (int i = 0; j + i < d; ++i) {
    const double difference = static_cast<double>(row[j + i]) - static_cast<double>(center[j + i]);
    total[i] += difference * difference;
  }
  return ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
}

bool range(const Dense& x, int64_t lo, int64_t hi, double* low, double* high) {
  return x.wide ? range_typed<double>(x, lo, hi, low, high) : range_typed<float>(x, lo, hi, low, high);
}

void quantize(const Dense& x, int64_t row, const Rounding& rounding, int16_t* values, int64_t* sums,
              int64_t* squares) {
  if (x.wide) return quantize_typed(typed_row<double>(x, row), x.d, rounding, values, sums, squares);
  quantize_typed(typed_row<float>(x, row), x.d, rounding, values, sums, squares);
}

void move(const Dense& x, int64_t row, const Rounding& rounding, double weight, int64_t* to, int64_t* from) {
  const auto add = [&]<class T>(const T* values) {
    weight == 1 ? move_typed<T, false>(values, x.d, rounding, 1, to, from)
                : move_typed<T, true>(values, x.d, rounding, weight, to, from);
  };
  x.wide ? add(typed_row<double>(x, row)) : add(typed_row<float>(x, row));
}

double distance(const Dense& x, int64_t row, const char* center) {
  if (x.wide) return distance_typed(typed_row<double>(x, row), reinterpret_cast<const double*>(center), x.d);
  return distance_typed(typed_row<float>(x, row), reinterpret_cast<const float*>(center), x.d);
}

template <class T, int kCount>
void distances_typed(const T* row, const double* centers, int64_t d, double* out) {
  constexpr int kSums = 8;  // as in distance_typed
  Doubles sums[kCount][kSums / kDoubles] = {}, value[kSums / kDoubles], other;
  int64_t j = 0;
  for (; j + kSums <= d; j += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kSums / kDoubles; ++part) widen(row + j + part * kDoubles, value[part]);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) {
#pragma GCC unroll 4
      for (int part = 0; part < kSums / kDoubles; ++part) {
        load(centers + c * d + j + part * kDoubles, other);
        const Doubles difference = value[part] - other;
        sums[c][part] += difference * difference;
      }
    }
  }
  for (int c = 0; c < kCount; ++c) {
    double total[kSums];
    __builtin_memcpy(total, sums[c], sizeof total);
    for (int i = 0; j + i < d; ++i) {
      const double difference = static_cast<double>(row[j + i]) - centers[c * d + j + i];
      total[i] += difference * difference;
    }
    out[c] =
        ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
  }
}

// Four centers at a time, which stay in the first-level cache while the rows pass.
template <class T>
void all_distances(const Dense& x, int64_t lo, int64_t hi, const double* centers, int64_t k, double* out) {
  constexpr int kTogether = 4;
  int64_t first = 0;
  for (; first + kTogether <= k; first += kTogether) {
    for (int64_t i = lo; i < hi; ++i) {
      distances_typed<T, kTogether>(typed_row<T>(x, i), centers + first * x.d, x.d,
                                    out + (i - lo) * k + first);
    }
  }
  for (; first < k; ++first) {
    for (int64_t i = lo; i < hi; ++i) {
      distances_typed<T, 1>(typed_row<T>(x, i), centers + first * x.d, x.d, out + (i - lo) * k + first);
    }
  }
}

void distances(const Dense& x, int64_t lo, int64_t hi, const double* centers, int64_t k, double* out) {
  x.wide ? all_distances<double>(x, lo, hi, centers, k, out)
         : all_distances<float>(x, lo, hi, centers, k, out);
}

template <class T>
float center_typed(const T* row, int64_t d, const float* mean, float* y) {
  for (int64_t j = 0; j < d; ++j) y[j] = static_cast<float>(row[j] - mean[j]);
  Floats sum[2] = {}, value;
  for (int64_t j = 0; j < d; j += 2 * kLanes) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      load(y + j + i * kLanes, value);
      sum[i] += value * value;
    }
  }
  return sum_across(sum[0] + sum[1]);
}

float center(const Dense& x, int64_t row, const float* mean, float* y) {
  return x.wide ? center_typed(typed_row<double>(x, row), x.d, mean, y)
                : center_typed(typed_row<float>(x, row), x.d, mean, y);
}

// Sums the lanes of each vector: one result per lane.
UEFL_INLINE Floats sums_across(Floats (&square)[kLanes]) {
  transpose(square);
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 2 * step) square[i] += square[i + step];
  }
  return square[0];
}

void products(const float* y, const float* centers, int64_t pitch, const int32_t* code, int64_t count,
              float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count;
       i += kLanes) {  // enough vectors to read the elements of the row once for all of them
    Floats sum[kLanes] = {}, value, other;
    const float* b[kLanes];
    for (int c = 0; c < kLanes; ++c) b[c] = centers + code[i + c] * pitch;
    for (int64_t j = 0; j < pitch; j += kLanes) {
      load(y + j, value);
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; ++c) {
        load(b[c] + j, other);
        subtract_product(value, other, sum[c]);
      }
    }
    store(sums_across(sum), out + i);
  }
  for (; i < count; ++i) {
    constexpr int kParts = 4;  // independent sums, so that one addition does not wait for the last
    Floats sum[kParts] = {}, value, other;
    const float* b = centers + code[i] * pitch;
    for (int64_t j = 0; j < pitch; j += kParts * kLanes) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        load(y + j + part * kLanes, value);
        load(b + j + part * kLanes, other);
        subtract_product(value, other, sum[part]);
      }
    }
    out[i] = sum_across((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

uint64_t possible(const float* reach, const float* half_squares, const float* way, float norm, float limit) {
  const Floats norms = broadcast(norm), limits = broadcast(limit);
  uint64_t bits = 0;
  for (int i = 0; i < 64; i += kLanes) {
    Floats bound, gone, kept;
    load(half_squares + i, bound);
    load(way + i, gone);
    load(reach + i, kept);
    subtract_product(norms, gone, bound);
    bits |= static_cast<uint64_t>(lanes_not_above(bound + kept, limits)) << i;
  }
  return bits;
}

int64_t improve(const int64_t* nearest, const double* weights, int shift, int64_t count, int64_t* distances) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    distances[i] = distances[i] < nearest[i] ? distances[i] : nearest[i];
    if (weights == nullptr) sum += distances[i];
  }
  if (weights == nullptr) return sum << shift;
  for (int64_t i = 0; i < count; ++i)
    sum += static_cast<int64_t>(__builtin_rint(weights[i] * static_cast<double>(distances[i])));
  return sum;
}

int64_t squares(const int16_t* values, int64_t d, int64_t* largest) {
  constexpr int64_t kPiece = 1024;  // elements per chunk: their sums stay in the first-level cache
  constexpr int kPieceLevel = 10;
  int64_t total[kRunLevels - kPieceLevel] = {}, all = 0;
  for (int64_t start = 0; start < d; start += kPiece) {
    int64_t sums[kPiece / 4], n = ((d - start < kPiece ? d - start : kPiece) + 3) / 4;
    for (int64_t i = 0; i < n; ++i) {
      const int16_t* v = values + start + 4 * i;
      sums[i] = static_cast<uint32_t>(v[0] * v[0] + v[1] * v[1]) + int64_t{v[2] * v[2] + v[3] * v[3]};
    }
    for (int level = 2; level <= kPieceLevel; ++level, n = (n + 1) / 2) {
      int64_t most = 0;
      for (int64_t i = 0; i < n; ++i) most = sums[i] > most ? sums[i] : most;
      largest[level] = most > largest[level] ? most : largest[level];
      if (n % 2) sums[n] = 0;
      if (level == kPieceLevel) break;
      for (int64_t i = 0; 2 * i < n; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    }
    all += sums[0];
    for (int level = kPieceLevel + 1; level < kRunLevels; ++level) {
      int64_t& run = total[level - kPieceLevel];
      run = (start >> level << level) == start ? sums[0] : run + sums[0];
      largest[level] = run > largest[level] ? run : largest[level];
    }
  }
  return all;
}

}  // namespace

const KMeansKernel UEFL_VARIANT(kmeans){range,  quantize, move,     distance, distances,
                                        center, products, possible, improve,  squares};

}  // namespace uefl::cpu
