// k-means on the CPU: seeding, Lloyd's algorithm and inertia of one problem, bit for bit as
// ops/kmeans/reference.py defines them. Nothing depends on the number of threads: labels come from the exact
// search, sums over rows are integers, and distances are summed in a fixed order.
// kmeans_step.h has one iteration, kmeans_problem.h the rows, kmeans_seeding.h the seeding.
#pragma once

#include <cstdint>

#include "cpu/kmeans_step.h"

namespace uefl::cpu {

enum class Seeding { given, random, plus_plus, parallel };

struct KMeansOptions {
  Seeding seeding;
  bool spherical;  // rows and centers of length one
  int64_t n_init, max_iter;
  double tol;  // relative to the mean variance of the columns
};

// One problem of n >= k >= 1 rows of dim >= 1. Results are float64 for float64 x, else float32.
struct KMeansProblem {
  StridedRows x;
  const double* weights;  // [n], or null for ones
  const void* init;       // [k, dim] in the dtype of the results when the centers are given, or null
  int64_t k;
  uint64_t seed;
  void* centers;        // [k, dim]
  int64_t* labels;      // [n]
  double* inertia;      // [1]
  int64_t* iterations;  // [1]
};

// Throws std::runtime_error when x, weights or given centers are not finite or too large, or when weights are
// negative or all zero.
void kmeans(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel);

}  // namespace uefl::cpu
