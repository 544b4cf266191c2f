// Rows against centers that stay where they are: labels, and distances, as ops/kmeans_labels/reference.py
// defines them, to the bit. Whether x is finite is seen from what is computed anyway: the search's squares of
// each row, or the distances.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"
#include "cpu/threads.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {

// The nearest center of each row of x [n, d]; distances [n], squared, or null. centers [k, d] as the search
// has them: float64 for float64 x, float32 for all else. Throws std::runtime_error as kmeans_scales() when x
// is not finite or too large.
void kmeans_labels(const StridedRows& x, const Search& search, const void* centers, const Parallel& parallel,
                   int64_t* labels, double* distances);

// The distances of each row of x to each of k centers, [n, k]: float64 for float64 x, float32 for all else.
// The same errors.
void kmeans_distances(const StridedRows& x, const double* centers, int64_t k, const Parallel& parallel,
                      void* distances);

}  // namespace uefl::cpu
