// The inner loops of a k-means step; kmeans_seeding_kernel.h has the loops of the seeding.
#pragma once

#include <cstdint>

namespace uefl::cpu {

// Rows [n, d], float64 if wide, else float32. Rows start `pitch` elements apart.
struct Dense {
  const char* data;
  bool wide;
  int64_t n, d, pitch = d;

  const char* row(int64_t i) const { return data + i * pitch * (wide ? 8 : 4); }
  Dense columns(int64_t first, int64_t last) const {
    return {data + first * (wide ? 8 : 4), wide, n, last - first, pitch};
  }
};

// A grid that turns elements into integers: round((x - middle) * scale).
struct Rounding {
  const double* middle;  // [d]
  const double* scale;   // [d]
  bool narrow = false;   // all results are below 2^51

  Rounding from(int64_t column) const { return {middle + column, scale + column, narrow}; }
};

constexpr int kAddedRows = 4;

struct KMeansKernel {
  // Lowers low [d] and raises high [d] to the range of the columns. Returns false if an element is not
  // finite.
  bool (*range)(const Dense& x, int64_t lo, int64_t hi, double* low, double* high);
  // Writes a row as 15-bit integers. Adds them and their squares to the column sums.
  void (*quantize)(const Dense& x, int64_t row, const Rounding& rounding, int16_t* values, int64_t* sums,
                   int64_t* squares);
  // Adds `count` rows to the sums [d] of their cluster. weights [n] may be null. A call for kAddedRows rows
  // reads and writes the sums once.
  void (*add)(const Dense& x, const int64_t* rows, int64_t count, const Rounding& rounding,
              const double* weights, int64_t* to);
  // Moves a row of this weight from the sums of one cluster to the sums of another.
  void (*move)(const Dense& x, int64_t row, const Rounding& rounding, double weight, int64_t* from,
               int64_t* to);
  // Writes the mean [d] of the rows that were added to these sums: middle + sums / scale / mass.
  void (*mean)(const int64_t* sums, int64_t d, const Rounding& rounding, double mass, double* values);
  // Returns the squared distance of a row to a center [d] of the same dtype, in the order of square_norms.
  double (*distance)(const Dense& x, int64_t row, const char* center);
  // Writes the same distances of rows [lo, hi) to each of k centers [k, d] in float64: out [hi - lo, k].
  void (*distances)(const Dense& x, int64_t lo, int64_t hi, const double* centers, int64_t k, double* out);
  // Writes these distances up to rounding, and faster. The centers [k, d] have the dtype of x. Apart from
  // overflow and underflow, the relative error is at most (d + 8) 2^-53 in float64, and float_error +
  // d 2^-53 in float32.
  void (*scores)(const Dense& x, int64_t lo, int64_t hi, const char* centers, int64_t k, double* out);
  double float_error;
  // Writes y = row - mean in float32. The caller has padded y with zeros to a multiple of 64. Returns the sum
  // of the squares of y.
  float (*center)(const Dense& x, int64_t row, const float* mean, float* y);
  // Writes -y.b for `count` of the centers [k, pitch]. pitch is a multiple of 64.
  void (*products)(const float* y, const float* centers, int64_t pitch, const int32_t* code, int64_t count,
                   float* out);
  // Returns one bit for each of 64 centers: half_squares + reach - norm * way <= limit. `way` is the distance
  // that a center has moved so far, and `reach` its -y.b + norm * way at the last product (kmeans_bounds.h).
  uint64_t (*possible)(const float* reach, const float* half_squares, const float* way, float norm,
                       float limit);
  // Computes distances = min(distances, nearest), both [count]. Returns the sum of their potentials. A
  // potential is shifted left if weights is null. Otherwise it is multiplied by the weight and rounded.
  int64_t (*improve)(const int64_t* nearest, const double* weights, int shift, int64_t count,
                     int64_t* distances);
  // Returns the sum of the squares of integers [d], padded with zeros to a multiple of four. Raises
  // largest[l] to the largest sum of 2^l adjacent squares that start at a multiple of 2^l, for l from 2 to
  // kRunLevels - 1.
  int64_t (*squares)(const int16_t* values, int64_t d, int64_t* largest);
};

constexpr int kRunLevels = 16;

extern const KMeansKernel kmeans_portable, kmeans_avx2, kmeans_avx512;

}  // namespace uefl::cpu
