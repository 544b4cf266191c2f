// k-means of sparse rows from given centers, by their non-zeros. Without weights, centers and labels have the
// bits of kmeans.h on the dense rows; with weights, centers agree up to rounding. Inertia and distances agree
// up to rounding, and have the same bits for any number of threads and on every instruction set.
#pragma once

#include <cstdint>

#include "cpu/kmeans.h"
#include "cpu/kmeans_sparse_search.h"

namespace uefl::cpu {

// Lloyd's algorithm from centers [k, d] in the dtype of the values; rows and centers have length 1 if
// options.spherical. weights [n] or null. Throws std::runtime_error as kmeans() does. Seeding and n_init of
// the options are not read.
void kmeans_sparse(const SparseRows& x, const double* weights, const void* init, int64_t k,
                   const KMeansOptions& options, const Parallel& parallel, const KMeansResult& result);

// The nearest of the centers [k, d] for each row, and the squared distance [n] to it.
void kmeans_sparse_labels(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                          int64_t* labels, double* squares);

// The distances [n, k] to all centers in the dtype of the values.
void kmeans_sparse_distances(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                             void* distances);

// The products [n, k] of the rows and the centers, in float64. Finite rows are not required.
void kmeans_sparse_products(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                            double* products);

}  // namespace uefl::cpu
