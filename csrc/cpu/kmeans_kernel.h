// The inner loops of k-means. Each kmeans.<isa>.cpp includes this body under the flags of its instruction set; no standard templates
// and internal linkage throughout, for the reason given in rows.h.
#pragma once

#include <cstdint>

namespace uefl::cpu {

constexpr int64_t kGroup = 8;  // candidates that are compared with a row at once

// Rows [n, d] without gaps, float64 if wide and float32 if not.
struct Dense {
  const char* data;
  bool wide;
  int64_t n, d;

  const char* row(int64_t i) const { return data + i * d * (wide ? 8 : 4); }
};

// Whole numbers instead of elements: round((x - middle) * scale).
struct Rounding {
  const double* middle;  // [d]
  const double* scale;   // [d]
};

struct KMeansKernel {
  // Lowers low and raises high, [d]; false when an element is not finite.
  bool (*range)(const Dense& x, int64_t lo, int64_t hi, double* low, double* high);
  // One row as whole numbers of 15 bits, which also go, and their squares, to the sums of their columns.
  void (*quantise)(const Dense& x, int64_t row, const Rounding& rounding, int16_t* values, int64_t* sums, int64_t* squares);
  // What a row of this weight adds to its new cluster and takes from its old one, which may be null.
  void (*move)(const Dense& x, int64_t row, const Rounding& rounding, double weight, int64_t* to, int64_t* from);
  // Squared distance of a row to a centre [d] of its own dtype, in the order of square_norms.
  double (*distance)(const Dense& x, int64_t row, const char* centre);
  // distances [count][kGroup] = min(distances, nearest [count]); adds their potentials to totals [kGroup]: shifted to the left when
  // weights is null, or else times weight and rounded.
  void (*improve)(const int64_t* nearest, const double* weights, int shift, int64_t count, int64_t* distances, int64_t* totals);
};

// Squared distances of rows of whole numbers to groups of candidates.
struct GridKernel {
  int64_t (*row_bytes)(int64_t d);    // memory of a row, of which there must be a multiple of 16
  int64_t (*group_bytes)(int64_t d);  // and of a group
  void (*store)(const int16_t* values, int64_t d, int64_t row, char* rows);
  void (*load)(const char* rows, int64_t d, int64_t row, int16_t* values);
  // Puts a row into its lane of a group, which was zero.
  void (*pack)(const int16_t* values, int64_t d, int64_t lane, char* group);
  // distances [count][kGroup] of the rows from `first` on, a multiple of 16, given the squared norms of the rows and the group.
  void (*distances)(const char* rows, const int64_t* norms, int64_t first, int64_t count, int64_t d, const char* group,
                    const int64_t* group_norms, int64_t* distances);
};

extern const KMeansKernel kmeans_portable, kmeans_avx2, kmeans_avx512;
extern const GridKernel grid_portable, grid_avx2, grid_avx512, grid_avx512vnni, grid_amx;

}  // namespace uefl::cpu

#if defined(UEFL_KERNEL_BODY)

namespace uefl::cpu {
namespace {

typedef float Float8 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));
typedef int64_t Long8 __attribute__((vector_size(64)));
typedef int16_t Short8 __attribute__((vector_size(16)));

template <class T>
inline const T* typed_row(const Dense& x, int64_t row) {
  return reinterpret_cast<const T*>(x.row(row));
}

// Eight elements in float64. By reference: a vector return has no fixed ABI across flags.
inline __attribute__((always_inline)) void load8(const float* x, Double8& out) {
  Float8 narrow;
  __builtin_memcpy(&narrow, x, sizeof narrow);
  out = __builtin_convertvector(narrow, Double8);
}
inline __attribute__((always_inline)) void load8(const double* x, Double8& out) { __builtin_memcpy(&out, x, sizeof out); }

// To the nearest whole number, ties to even: below 2^52 by adding and subtracting it, above there is nothing to round.
inline __attribute__((always_inline)) void round8(Double8& value) {
  const Double8 large = Double8{} + 0x1p52, shift = (Double8)(((Long8)value & INT64_MIN) | (Long8)large);
  value = (Double8)((Long8)value & INT64_MAX) < large ? (value + shift) - shift : value;
}

// Whole numbers of eight elements of a row from j on, of which the last may be missing: they are zero.
template <class T>
inline __attribute__((always_inline)) void whole8(const T* row, int64_t j, int64_t d, const Rounding& rounding, double weight,
                                                  Double8& out) {
  if (d - j >= 8) {
    Double8 middle, scale;
    load8(row + j, out);
    load8(rounding.middle + j, middle);
    load8(rounding.scale + j, scale);
    out = (out - middle) * weight * scale;
  } else {
    out = Double8{};
    for (int64_t i = j; i < d; ++i) out[i - j] = (static_cast<double>(row[i]) - rounding.middle[i]) * weight * rounding.scale[i];
  }
  round8(out);
}

inline __attribute__((always_inline)) void add8(const Long8& units, int64_t j, int64_t d, int64_t* sums) {
  if (d - j >= 8) {
    Long8 sum;
    __builtin_memcpy(&sum, sums + j, sizeof sum);
    sum += units;
    __builtin_memcpy(sums + j, &sum, sizeof sum);
  } else {
    for (int64_t i = j; i < d; ++i) sums[i] += units[i - j];
  }
}

template <class T>
bool range_typed(const Dense& x, int64_t lo, int64_t hi, double* low, double* high) {
  constexpr int64_t kTogether = 4;   // rows that share one look at the extremes
  constexpr int64_t kColumns = 256;  // whose extremes stay in the first-level cache
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
        const T all_least = ab_least < ce_least ? ab_least : ce_least, all_most = ab_most > ce_most ? ab_most : ce_most;
        least[j] = all_least < least[j] ? all_least : least[j];
        most[j] = all_most > most[j] ? all_most : most[j];
        zero[j] += ((a[j] * 0 + b[j] * 0) + (c[j] * 0 + e[j] * 0));  // NaN from the first element that is not finite
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

// Left to the compiler, whose own narrowing to 16 bits is the faster one.
template <class T>
void quantise_typed(const T* row, int64_t d, const Rounding& rounding, int16_t* values, int64_t* sums, int64_t* squares) {
  for (int64_t j = 0; j < d; ++j) {
    const double value = __builtin_rint((static_cast<double>(row[j]) - rounding.middle[j]) * rounding.scale[j]);
    values[j] = static_cast<int16_t>(static_cast<int32_t>(value));
  }
  for (int64_t j = 0; j < d; ++j) {
    const int32_t value = values[j];
    sums[j] += value;
    squares[j] += value * value;
  }
}

template <class T>
void move_typed(const T* row, int64_t d, const Rounding& rounding, double weight, int64_t* to, int64_t* from) {
  for (int64_t j = 0; j < d; j += 8) {
    Double8 value;
    whole8(row, j, d, rounding, weight, value);
    const Long8 units = __builtin_convertvector(value, Long8);
    add8(units, j, d, to);
    if (from != nullptr) add8(-units, j, d, from);
  }
}

template <class T>
double distance_typed(const T* row, const T* centre, int64_t d) {
  Double8 total = {};
  int64_t j = 0;
  for (; j + 8 <= d; j += 8) {
    Double8 value, other;
    load8(row + j, value);
    load8(centre + j, other);
    const Double8 difference = value - other;
    total += difference * difference;
  }
  for (int i = 0; j + i < d; ++i) {
    const double difference = static_cast<double>(row[j + i]) - static_cast<double>(centre[j + i]);
    total[i] += difference * difference;
  }
  return ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
}

bool range(const Dense& x, int64_t lo, int64_t hi, double* low, double* high) {
  return x.wide ? range_typed<double>(x, lo, hi, low, high) : range_typed<float>(x, lo, hi, low, high);
}

void quantise(const Dense& x, int64_t row, const Rounding& rounding, int16_t* values, int64_t* sums, int64_t* squares) {
  if (x.wide) return quantise_typed(typed_row<double>(x, row), x.d, rounding, values, sums, squares);
  quantise_typed(typed_row<float>(x, row), x.d, rounding, values, sums, squares);
}

void move(const Dense& x, int64_t row, const Rounding& rounding, double weight, int64_t* to, int64_t* from) {
  if (x.wide) return move_typed(typed_row<double>(x, row), x.d, rounding, weight, to, from);
  move_typed(typed_row<float>(x, row), x.d, rounding, weight, to, from);
}

double distance(const Dense& x, int64_t row, const char* centre) {
  if (x.wide) return distance_typed(typed_row<double>(x, row), reinterpret_cast<const double*>(centre), x.d);
  return distance_typed(typed_row<float>(x, row), reinterpret_cast<const float*>(centre), x.d);
}

void improve(const int64_t* nearest, const double* weights, int shift, int64_t count, int64_t* distances, int64_t* totals) {
  int64_t sums[kGroup] = {};
  for (int64_t i = 0; i < count; ++i) {
    int64_t* distance = distances + i * kGroup;
    for (int c = 0; c < kGroup; ++c) distance[c] = distance[c] < nearest[i] ? distance[c] : nearest[i];
    if (weights == nullptr) {
      for (int c = 0; c < kGroup; ++c) sums[c] += distance[c];
    } else {
      for (int c = 0; c < kGroup; ++c) sums[c] += static_cast<int64_t>(__builtin_rint(weights[i] * static_cast<double>(distance[c])));
    }
  }
  for (int c = 0; c < kGroup; ++c) totals[c] += weights == nullptr ? sums[c] << shift : sums[c];
}

// Rows of int16, filled up to whole vectors, and groups [kGroup][d] of float64, in which products and their sums are exact.
inline int64_t padded(int64_t d) { return (d + 7) / 8 * 8; }
int64_t row_bytes(int64_t d) { return padded(d) * 2; }
int64_t group_bytes(int64_t d) { return padded(d) * 8 * kGroup; }

void store(const int16_t* values, int64_t d, int64_t row, char* rows) {
  int16_t* target = reinterpret_cast<int16_t*>(rows + row * row_bytes(d));
  for (int64_t j = 0; j < d; ++j) target[j] = values[j];
  for (int64_t j = d; j < padded(d); ++j) target[j] = 0;
}

void load(const char* rows, int64_t d, int64_t row, int16_t* values) { __builtin_memcpy(values, rows + row * row_bytes(d), d * 2); }

void pack(const int16_t* values, int64_t d, int64_t lane, char* group) {
  double* target = reinterpret_cast<double*>(group);
  for (int64_t j = 0; j < d; ++j) target[(j / 8 * kGroup + lane) * 8 + j % 8] = values[j];
}

void distances(const char* rows, const int64_t* norms, int64_t first, int64_t count, int64_t d, const char* group,
               const int64_t* group_norms, int64_t* distances) {
  for (int64_t i = 0; i < count; ++i) {
    const int16_t* row = reinterpret_cast<const int16_t*>(rows + (first + i) * row_bytes(d));
    Double8 products[kGroup] = {};
    const char* candidates = group;
    for (int64_t j = 0; j < d; j += 8) {
      Short8 narrow;
      __builtin_memcpy(&narrow, row + j, sizeof narrow);
      const Double8 value = __builtin_convertvector(narrow, Double8);
#pragma GCC unroll 8
      for (int c = 0; c < kGroup; ++c, candidates += sizeof(Double8)) {
        Double8 other;
        __builtin_memcpy(&other, candidates, sizeof other);
        products[c] += value * other;
      }
    }
    for (int c = 0; c < kGroup; ++c) {
      double product = 0;
      for (int lane = 0; lane < 8; ++lane) product += products[c][lane];
      distances[i * kGroup + c] = norms[first + i] + group_norms[c] - 2 * static_cast<int64_t>(product);
    }
  }
}

constexpr KMeansKernel kKMeans{range, quantise, move, distance, improve};
constexpr GridKernel kGrid{row_bytes, group_bytes, store, load, pack, distances};

}  // namespace
}  // namespace uefl::cpu

#endif
