// k-means of sparse rows from given centers, which reads only their non-zeros. Without weights, centers and
// labels have the bits of kmeans.h on the dense rows. With weights, centers agree up to rounding. Inertia and
// distances agree up to rounding, and have the same bits for any number of threads and on every instruction
// set.
#pragma once

#include <cstdint>

#include "cpu/kmeans.h"
#include "cpu/kmeans_sparse_search.h"

namespace uefl::cpu {

// Runs Lloyd's algorithm from centers [k, d] in the dtype of the values. Rows and centers have length 1 if
// options.spherical. weights are [n] or null. Throws std::runtime_error as kmeans() does. It does not read
// the seeding and n_init of the options.
void kmeans_sparse(const SparseRows& x, const double* weights, const void* init, int64_t k,
                   const KMeansOptions& options, const Parallel& parallel, const KMeansResult& result);

// Finds the nearest of the centers [k, d] for each row, and the squared distance [n] to it.
void kmeans_sparse_labels(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                          int64_t* labels, double* squares);

// Computes the distances [n, k] to all centers in the dtype of the values.
void kmeans_sparse_distances(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                             void* distances);

// Computes the products [n, k] of the rows and the centers in float64. Rows need not be finite.
void kmeans_sparse_products(const SparseRows& x, const double* centers, int64_t k, const Parallel& parallel,
                            double* products);

}  // namespace uefl::cpu
