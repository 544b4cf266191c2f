// k-means on the CPU: seeding, Lloyd's algorithm and inertia of one problem, bit for bit as
// ops/kmeans/reference.py defines them. The results do not depend on the number of threads: labels come from
// the exact search, sums over rows are integers, and distances are summed in a fixed order. kmeans_step.h has
// one iteration, kmeans_problem.h has the rows, and kmeans_seeding.h has the seeding.
#pragma once

#include <cstdint>

#include "cpu/kmeans_step.h"

namespace uefl::cpu {

enum class Seeding { given, random, plus_plus, parallel };

struct KMeansOptions {
  Seeding seeding;
  bool spherical;            // scale rows and centers to length 1
  int64_t n_init, max_iter;  // number of fits from different seeds; largest number of iterations of each fit
  double tol;                // relative to the mean variance of the columns
};

struct KMeansResult {
  void* centers;        // [k, dim]
  int64_t* labels;      // [n]
  double* inertia;      // [1]
  int64_t* iterations;  // [1]
};

// One problem with n rows of dim >= 1 elements, n >= k >= 1. The centers are float64 for float64 x, otherwise
// float32.
struct KMeansProblem {
  StridedRows x;
  const double* weights;  // [n], or null for ones
  const void* init;       // [k, dim] in the dtype of the centers for Seeding::given, otherwise null
  int64_t k;
  uint64_t seed;
  KMeansResult result;
};

// Solves one problem. Throws std::runtime_error if x, weights or given centers are too large or not finite,
// or if weights are negative or all zero.
void kmeans(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel);

}  // namespace uefl::cpu
