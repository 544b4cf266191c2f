// k-means on the CPU: seeding, Lloyd's algorithm and inertia of one problem, as ops/kmeans/reference.py
// defines them, to the bit. Nothing depends on the number of threads: labels are the exact answer of the
// search, sums over rows are integers, distances are summed in a fixed order. kmeans_step.h: one iteration;
// kmeans_problem.h: the rows; kmeans_seeding.h: seeding.
#pragma once

#include <cstdint>

#include "cpu/kmeans_step.h"

namespace uefl::cpu {

enum class Seeding { given, random, plus_plus, parallel };

struct KMeansOptions {
  Seeding seeding;
  bool spherical;  // rows and centres of length one
  int64_t n_init, max_iter;
  double tol;  // of the mean variance of the columns
};

// One problem of n >= k >= 1 rows of dim >= 1. Results are float64 for float64 x, and float32 for all else.
struct KMeansProblem {
  StridedRows x;
  const double* weights;  // [n], or null for ones
  const void* init;       // [k, dim] in the dtype of the results when the centres are given, or null
  int64_t k;
  uint64_t seed;
  void* centres;        // [k, dim]
  int64_t* labels;      // [n]
  double* inertia;      // [1]
  int64_t* iterations;  // [1]
};

// Throws std::runtime_error when x, weights or given centres are not finite or too large, or weights are
// negative or all zero.
void kmeans(const KMeansProblem& problem, const KMeansOptions& options, const Parallel& parallel);

}  // namespace uefl::cpu
