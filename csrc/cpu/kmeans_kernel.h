// The inner loops of the steps of k-means; those of its seeding are in kmeans_seeding_kernel.h.
#pragma once

#include <cstdint>

namespace uefl::cpu {

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
  void (*quantise)(const Dense& x, int64_t row, const Rounding& rounding, int16_t* values, int64_t* sums,
                   int64_t* squares);
  // What a row of this weight adds to its new cluster and takes from its old one, which may be null.
  void (*move)(const Dense& x, int64_t row, const Rounding& rounding, double weight, int64_t* to,
               int64_t* from);
  // Squared distance of a row to a centre [d] of its own dtype, in the order of square_norms.
  double (*distance)(const Dense& x, int64_t row, const char* centre);
  // The same of rows [lo, hi) to each of k centers [k, d] in float64: out [hi - lo, k].
  void (*distances)(const Dense& x, int64_t lo, int64_t hi, const double* centers, int64_t k, double* out);
  // y = row - mean in float32; zeros are already there behind d elements, up to a multiple of 64. Returns the
  // sum of its squares.
  float (*centre)(const Dense& x, int64_t row, const float* mean, float* y);
  // -y.b for `count` of the codes [k, pitch], pitch a multiple of 64.
  void (*products)(const float* y, const float* codes, int64_t pitch, const int32_t* code, int64_t count,
                   float* out);
  // A bit for each of 64 with half_squares + reach - norm * way <= limit.
  uint64_t (*possible)(const float* reach, const float* half_squares, const float* way, float norm,
                       float limit);
  // distances = min(distances, nearest), both [count]. Returns the sum of their potentials: shifted to the
  // left when weights is null, or else times weight and rounded.
  int64_t (*improve)(const int64_t* nearest, const double* weights, int shift, int64_t count,
                     int64_t* distances);
  // The sum of the squares of whole numbers [d], filled up with zeros to a multiple of four. Raises
  // largest[l] to the largest sum of 2^l of them that lie together, from a multiple of 2^l on; l from 2 to
  // kRunLevels - 1.
  int64_t (*squares)(const int16_t* values, int64_t d, int64_t* largest);
};

constexpr int kRunLevels = 16;

extern const KMeansKernel kmeans_portable, kmeans_avx2, kmeans_avx512;

}  // namespace uefl::cpu
