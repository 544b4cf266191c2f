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

// Lowers least and raises most to the range of four rows. An element that is not finite makes zero NaN.
// Without __restrict, the compiler's vectors would not be used.
template <class T>
__attribute__((noinline)) void extend_range(const T* __restrict a, const T* __restrict b,
                                            const T* __restrict c, const T* __restrict e, int64_t columns,
                                            T* __restrict least, T* __restrict most, T* __restrict zero) {
  for (int64_t j = 0; j < columns; ++j) {
    const T ab_least = a[j] < b[j] ? a[j] : b[j], ce_least = c[j] < e[j] ? c[j] : e[j];
    const T ab_most = a[j] > b[j] ? a[j] : b[j], ce_most = c[j] > e[j] ? c[j] : e[j];
    const T all_least = ab_least < ce_least ? ab_least : ce_least,
            all_most = ab_most > ce_most ? ab_most : ce_most;
    least[j] = all_least < least[j] ? all_least : least[j];
    most[j] = all_most > most[j] ? all_most : most[j];
    zero[j] += (a[j] * 0 + b[j] * 0) + (c[j] * 0 + e[j] * 0);
  }
}

template <class T>
bool range_typed(const Dense& x, int64_t lo, int64_t hi, double* low, double* high) {
  constexpr int64_t kColumns = 4096 / sizeof(T);  // columns of extremes that stay in the first-level cache
  bool finite = true;
  for (int64_t start = 0; start < x.d; start += kColumns) {
    const int64_t columns = x.d - start < kColumns ? x.d - start : kColumns;
    const auto row = [&](int64_t i) { return typed_row<T>(x, i < hi ? i : hi - 1) + start; };
    T least[kColumns], most[kColumns], zero[kColumns] = {};
    for (int64_t j = 0; j < columns; ++j) least[j] = most[j] = row(lo)[j];
    for (int64_t i = lo; i < hi; i += 4)
      extend_range(row(i), row(i + 1), row(i + 2), row(i + 3), columns, least, most, zero);
    for (int64_t j = 0; j < columns; ++j) {
      finite = finite && zero[j] == 0;
      low[start + j] = least[j] < low[start + j] ? least[j] : low[start + j];
      high[start + j] = most[j] > high[start + j] ? most[j] : high[start + j];
    }
  }
  return finite;
}

// No explicit vectors, because the compiler's own conversion to 16 bits is faster.
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

// Calls body.operator()<kCount>(i) for groups of kMost from `first` on, and for at most one smaller group of
// each size.
template <int kMost, class Body>
UEFL_INLINE void for_groups(int64_t first, int64_t last, const Body& body) {
  for (; first + kMost <= last; first += kMost) body.template operator()<kMost>(first);
  if constexpr (kMost > 1) for_groups<kMost - 1>(first, last, body);
}

template <bool kNarrow>
UEFL_INLINE SignedLongs units_of(const Doubles& x) {
  if constexpr (kNarrow) return rounded_narrow(x);
  return rounded(x);
}

template <bool kNarrow, bool kWeighted, class T>
void move_typed(const T* row, int64_t d, const Rounding& rounding, double weight, int64_t* from,
                int64_t* to) {
  int64_t j = 0;
  for (; j + kDoubles <= d; j += kDoubles) {
    Doubles value, middle, scale;
    widen(row + j, value);
    widen(rounding.middle + j, middle);
    widen(rounding.scale + j, scale);
    value -= middle;
    if (kWeighted) value *= weight;
    const SignedLongs units = units_of<kNarrow>(value * scale);
    SignedLongs sum;
    load(to + j, sum);
    store(sum + units, to + j);
    load(from + j, sum);
    store(sum - units, from + j);
  }
  for (; j < d; ++j) {
    const double value = (static_cast<double>(row[j]) - rounding.middle[j]) * weight * rounding.scale[j];
    const int64_t units = static_cast<int64_t>(__builtin_rint(value));
    to[j] += units;
    from[j] -= units;
  }
}

// Adds kRows rows of one cluster to its sums, and so reads and writes the sums once.
template <int kRows, bool kNarrow, bool kWeighted, class T>
UEFL_INLINE void add_typed(const Dense& x, const int64_t* rows, const Rounding& rounding,
                           const double* weights, int64_t* to) {
  const T* row[kRows];
  double weight[kRows];
  for (int r = 0; r < kRows; ++r) {
    row[r] = typed_row<T>(x, rows[r]);
    weight[r] = kWeighted ? weights[rows[r]] : 1;
  }
  int64_t j = 0;
  for (; j + kDoubles <= x.d; j += kDoubles) {
    Doubles value, middle, scale;
    SignedLongs sum;
    widen(rounding.middle + j, middle);
    widen(rounding.scale + j, scale);
    load(to + j, sum);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      widen(row[r] + j, value);
      value -= middle;
      if (kWeighted) value *= weight[r];
      sum += units_of<kNarrow>(value * scale);
    }
    store(sum, to + j);
  }
  for (; j < x.d; ++j) {
    for (int r = 0; r < kRows; ++r) {
      const double value = static_cast<double>(row[r][j]) - rounding.middle[j];
      to[j] += static_cast<int64_t>(__builtin_rint(value * weight[r] * rounding.scale[j]));
    }
  }
}

constexpr int kSums = 8;  // the same on every instruction set, so that all add in the same order
constexpr int kOrdered = kSums / kDoubles;  // vectors of a sum in that order

// Adds squared differences of a row and kCenters centers, pitch apart, to their sums. The sums begin at zero
// if `fresh`.
template <int kCenters, class T, class Center>
UEFL_INLINE void add_squares(const T* row, const Center* centers, int64_t pitch, int64_t count, bool fresh,
                             double (*sums)[kSums]) {
  Doubles sum[kCenters][kOrdered] = {}, value[kOrdered], other;
  const auto for_sums = [&](const auto& work) {  // a copy of the whole array would move it to memory
#pragma GCC unroll 4
    for (int c = 0; c < kCenters; ++c) {
#pragma GCC unroll 4
      for (int p = 0; p < kOrdered; ++p) work(sum[c][p], sums[c] + p * kDoubles);
    }
  };
  if (!fresh) for_sums([](Doubles& vector, const double* from) { load(from, vector); });
  int64_t j = 0;
  for (; j + kSums <= count; j += kSums) {
#pragma GCC unroll 4
    for (int p = 0; p < kOrdered; ++p) widen(row + j + p * kDoubles, value[p]);
#pragma GCC unroll 4
    for (int c = 0; c < kCenters; ++c) {
#pragma GCC unroll 4
      for (int p = 0; p < kOrdered; ++p) {
        widen(centers + c * pitch + j + p * kDoubles, other);
        const Doubles difference = value[p] - other;
        sum[c][p] += difference * difference;
      }
    }
  }
  for_sums([](const Doubles& vector, double* to) { store(vector, to); });
  for (int i = 0; j + i < count; ++i) {
    for (int c = 0; c < kCenters; ++c) {
      const double difference =
          static_cast<double>(row[j + i]) - static_cast<double>(centers[c * pitch + j + i]);
      sums[c][i] += difference * difference;
    }
  }
}

inline double total_of(const double (&sums)[kSums]) {
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

template <class T>
double distance_typed(const T* row, const T* center, int64_t d) {
  double sums[1][kSums];
  add_squares<1>(row, center, 0, d, true, sums);
  return total_of(sums[0]);
}

void mean(const int64_t* sums, int64_t d, const Rounding& rounding, double mass, double* values) {
  int64_t j = 0;
  for (; j + kDoubles <= d; j += kDoubles) {
    SignedLongs sum;
    Doubles middle, scale;
    load(sums + j, sum);
    widen(rounding.middle + j, middle);
    widen(rounding.scale + j, scale);
    store(middle + __builtin_convertvector(sum, Doubles) / scale / mass, values + j);
  }
  for (; j < d; ++j) values[j] = rounding.middle[j] + static_cast<double>(sums[j]) / rounding.scale[j] / mass;
}

bool range(const Dense& x, int64_t lo, int64_t hi, double* low, double* high) {
  return x.wide ? range_typed<double>(x, lo, hi, low, high) : range_typed<float>(x, lo, hi, low, high);
}

void quantize(const Dense& x, int64_t row, const Rounding& rounding, int16_t* values, int64_t* sums,
              int64_t* squares) {
  if (x.wide) return quantize_typed(typed_row<double>(x, row), x.d, rounding, values, sums, squares);
  quantize_typed(typed_row<float>(x, row), x.d, rounding, values, sums, squares);
}

// Calls body.operator()<kNarrow, kWeighted>(typed null pointer) for the type of the rows.
template <class Body>
void with_form(const Dense& x, bool narrow, bool weighted, const Body& body) {
  const auto typed = [&]<class T>(const T* type) {
    const auto weights = [&]<bool kNarrow>() {
      weighted ? body.template operator()<kNarrow, true>(type)
               : body.template operator()<kNarrow, false>(type);
    };
    narrow ? weights.template operator()<true>() : weights.template operator()<false>();
  };
  x.wide ? typed(static_cast<const double*>(nullptr)) : typed(static_cast<const float*>(nullptr));
}

void add(const Dense& x, const int64_t* rows, int64_t count, const Rounding& rounding, const double* weights,
         int64_t* to) {
  with_form(x, rounding.narrow, weights != nullptr, [&]<bool kNarrow, bool kWeighted, class T>(const T*) {
    for_groups<kAddedRows>(0, count, [&]<int kRows>(int64_t i) {
      add_typed<kRows, kNarrow, kWeighted, T>(x, rows + i, rounding, weights, to);
    });
  });
}

void move(const Dense& x, int64_t row, const Rounding& rounding, double weight, int64_t* from, int64_t* to) {
  with_form(x, rounding.narrow, weight != 1, [&]<bool kNarrow, bool kWeighted, class T>(const T*) {
    move_typed<kNarrow, kWeighted>(typed_row<T>(x, row), x.d, rounding, weight, from, to);
  });
}

double distance(const Dense& x, int64_t row, const char* center) {
  if (x.wide) return distance_typed(typed_row<double>(x, row), reinterpret_cast<const double*>(center), x.d);
  return distance_typed(typed_row<float>(x, row), reinterpret_cast<const float*>(center), x.d);
}

// Processes rows and centers in groups, and the columns of a group in blocks. A block of the rows then stays
// in the first-level cache, and long rows and centers are read once or a few times.
constexpr int64_t kBlockColumns = 512;
template <class T>
void distances_typed(const Dense& x, int64_t lo, int64_t hi, const double* centers, int64_t k, double* out) {
  constexpr int64_t kRows = 8, kCenters = 16;
  const auto group = [&](int64_t row, int64_t rows, int64_t first, int64_t count) {
    double sums[kRows][kCenters][kSums];
    for (int64_t start = 0; start < x.d; start += kBlockColumns) {
      const int64_t columns = x.d - start < kBlockColumns ? x.d - start : kBlockColumns;
      for_groups<4>(0, count, [&]<int kCount>(int64_t c) {
        for (int64_t r = 0; r < rows; ++r) {
          add_squares<kCount>(typed_row<T>(x, row + r) + start, centers + (first + c) * x.d + start, x.d,
                              columns, start == 0, &sums[r][c]);
        }
      });
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < count; ++c) out[(row + r - lo) * k + first + c] = total_of(sums[r][c]);
    }
  };
  for (int64_t row = lo; row < hi; row += kRows) {
    for (int64_t first = 0; first < k; first += kCenters)
      group(row, hi - row < kRows ? hi - row : kRows, first, k - first < kCenters ? k - first : kCenters);
  }
}

void distances(const Dense& x, int64_t lo, int64_t hi, const double* centers, int64_t k, double* out) {
  x.wide ? distances_typed<double>(x, lo, hi, centers, k, out)
         : distances_typed<float>(x, lo, hi, centers, k, out);
}

UEFL_INLINE double lanes_sum(const Floats& x) { return static_cast<double>(sum_across(x)); }
UEFL_INLINE double lanes_sum(const Doubles& x) {
  double sum = x[0];
  for (int i = 1; i < kDoubles; ++i) sum += x[i];
  return sum;
}

// Rows and centers of a group. Their sums are independent, which hides the latency of an addition, and fit in
// the registers together with the operands.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kGroup = 4;
#else
constexpr int kGroup = 3;
#endif

// Adds the squared distances of kRows rows, x_pitch apart, and kCenters centers, pitch apart, in some
// columns. The results of the rows are `width` apart.
template <class Vector, int kRows, int kCenters, class T>
UEFL_INLINE void add_scores(const T* x, int64_t x_pitch, const T* centers, int64_t pitch, int64_t columns,
                            double* out, int64_t width) {
  constexpr int kWidth = sizeof(Vector) / sizeof(T);
  Vector sum[kRows][kCenters] = {}, value[kRows], other;
  int64_t j = 0;
  for (; j + kWidth <= columns; j += kWidth) {
#pragma GCC unroll kGroup
    for (int r = 0; r < kRows; ++r) load(x + r * x_pitch + j, value[r]);
#pragma GCC unroll kGroup
    for (int c = 0; c < kCenters; ++c) {
      load(centers + c * pitch + j, other);
#pragma GCC unroll kGroup
      for (int r = 0; r < kRows; ++r) {
        const Vector difference = value[r] - other;
        sum[r][c] = fused(difference, difference, sum[r][c]);
      }
    }
  }
#pragma GCC unroll kGroup
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll kGroup
    for (int c = 0; c < kCenters; ++c) {
      double total = lanes_sum(sum[r][c]);
      for (int64_t i = j; i < columns; ++i) {
        const double difference = x[r * x_pitch + i] - centers[c * pitch + i];
        total += difference * difference;
      }
      out[r * width + c] += total;
    }
  }
}

// Processes rows in groups, and the columns of a group in blocks. A block of a group and of all centers stays
// in the second-level cache, so that each row is read once.
template <class Vector, class T>
void scores_typed(const Dense& x, int64_t lo, int64_t hi, const T* centers, int64_t k, double* out) {
  constexpr int64_t kBlockRows = 128;
  for (int64_t i = 0; i < (hi - lo) * k; ++i) out[i] = 0;
  for (int64_t row = lo; row < hi; row += kBlockRows) {
    const int64_t last = hi - row < kBlockRows ? hi : row + kBlockRows;
    for (int64_t start = 0; start < x.d; start += kBlockColumns) {
      const int64_t columns = x.d - start < kBlockColumns ? x.d - start : kBlockColumns;
      for_groups<kGroup>(0, k, [&]<int kCenters>(int64_t c) {
        const T* center = centers + c * x.d + start;
        for_groups<kGroup>(row, last, [&]<int kRows>(int64_t r) {
          add_scores<Vector, kRows, kCenters>(typed_row<T>(x, r) + start, x.pitch, center, x.d, columns,
                                              out + (r - lo) * k + c, k);
        });
      });
    }
  }
}

void scores(const Dense& x, int64_t lo, int64_t hi, const char* centers, int64_t k, double* out) {
  x.wide ? scores_typed<Doubles>(x, lo, hi, reinterpret_cast<const double*>(centers), k, out)
         : scores_typed<Floats>(x, lo, hi, reinterpret_cast<const float*>(centers), k, out);
}

// In a block, a lane adds kBlockColumns / kLanes rounded squares.
constexpr double kFloatError = (kBlockColumns / kLanes + kLanes + 4) * 0x1p-24;

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
    constexpr int kParts = 4;  // independent sums, so that an addition does not wait for the one before it
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

const KMeansKernel UEFL_VARIANT(kmeans){range,  quantize,    add,    move,     mean,     distance, distances,
                                        scores, kFloatError, center, products, possible, improve,  squares};

}  // namespace uefl::cpu
