// The inner loops of k-means on sparse rows. Non-zeros are added in their order on every instruction set, and
// a product and a sum are rounded separately. So the results have the same bits on all of them.
#pragma once

#include <cstdint>

namespace uefl::cpu {

// The non-zeros of a row, float64 if wide, otherwise float32.
struct SparseRow {
  const char* values;
  const int32_t* columns;
  int64_t count;
  bool wide;
};

struct SparseTopTwo {
  double best, second;
  int64_t index;
};

// The padding: rows of the transposed centers have zeros up to a multiple of this many doubles.
constexpr int64_t kSparsePad = 8;

struct KMeansSparseKernel {
  // Writes the products of a row and the centers: out [pitch] from centers [d, pitch]. pitch is a multiple of
  // kSparsePad.
  void (*products)(const SparseRow& row, const double* centers, int64_t pitch, double* out);
  // Returns the best and the second-best score of half_norms - products, both [pitch].
  SparseTopTwo (*top_two)(const double* products, const double* half_norms, int64_t pitch);
  // Returns the sum of the squares of a row.
  double (*square)(const SparseRow& row);
  // Returns how many of the columns are not above the column before them.
  int64_t (*falls)(const int32_t* columns, int64_t count);
};

extern const KMeansSparseKernel kmeans_sparse_portable, kmeans_sparse_avx2, kmeans_sparse_avx512;

}  // namespace uefl::cpu
