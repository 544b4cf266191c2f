// Labels and distances of rows for fixed centers, bit for bit as ops/kmeans_labels/reference.py defines them.
// The check for finite x reads the squares or distances that are computed anyway.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"
#include "cpu/threads.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {

// Finds the nearest center of each row of x [n, d]. distances [n] are squared; they may be null. centers [k,
// d] have the dtype of the search: float64 for float64 x, otherwise float32. Throws std::runtime_error as
// kmeans_scales() does if x is not finite or too large.
void kmeans_labels(const StridedRows& x, const Search& search, const void* centers, const Parallel& parallel,
                   int64_t* labels, double* distances);

// Computes the distances of each row of x to each of k centers, [n, k]: float64 for float64 x, otherwise
// float32. Throws the same errors.
void kmeans_distances(const StridedRows& x, const double* centers, int64_t k, const Parallel& parallel,
                      void* distances);

}  // namespace uefl::cpu
