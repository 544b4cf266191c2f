#include "cpu/kmeans_labels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "cpu/kmeans_kernel.h"
#include "cpu/kmeans_step.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kRows = 32;  // rows of a block; their distances stay in the second-level cache

// Calls work(lo, hi) in parallel for portions of `step` of n rows.
template <class Body>
void in_portions(int64_t n, int64_t step, const Parallel& parallel, const Body& work) {
  parallel((n + step - 1) / step, [&](int64_t lo, int64_t hi) { work(lo * step, std::min(n, hi * step)); });
}

// Throws an error if x is not finite. Large finite numbers may overflow too, so only an infinite sum leads to
// a check of every element.
void require_finite(const StridedRows& x, const Parallel& parallel, bool finite) {
  if (!finite) kmeans_scales(x, nullptr, parallel, "kmeans_labels");
}

}  // namespace

void kmeans_labels(const StridedRows& x, const Search& search, const void* centers, const Parallel& parallel,
                   int64_t* labels, double* distances) {
  const int64_t step = search.block_rows(x.dim), center_bytes = x.dim * (x.dtype == Dtype::f64 ? 8 : 4);
  std::atomic<bool> finite = true;
  in_portions(x.outer * x.inner, step, parallel, [&](int64_t first, int64_t last) {
    Search::Scratch scratch(search);
    DenseRows rows(x);
    if (!distances) {
      search.assign(x, first, last, labels, scratch);
    } else {
      for (int64_t lo = first; lo < last; lo += step) {
        const int64_t hi = std::min(last, lo + step);
        const Dense dense = rows.read(lo, hi);
        search.assign(rows_of(dense), lo, hi, labels, scratch);
        for (int64_t i = lo; i < hi; ++i) {
          distances[i] = kmeans_kernel().distance(
              dense, i, static_cast<const char*>(centers) + labels[i] * center_bytes);
        }
      }
    }
    if (!scratch.finite()) finite = false;
  });
  require_finite(x, parallel, finite);
}

void kmeans_distances(const StridedRows& x, const double* centers, int64_t k, const Parallel& parallel,
                      void* distances) {
  std::atomic<bool> finite = true;
  in_portions(x.outer * x.inner, kRows, parallel, [&](int64_t first, int64_t last) {
    DenseRows rows(x);
    std::vector<double> found(kRows * k);
    bool all = true;
    for (int64_t lo = first; lo < last; lo += kRows) {
      const int64_t hi = std::min(last, lo + kRows);
      kmeans_kernel().distances(rows.read(lo, hi), lo, hi, centers, k, found.data());
      for (int64_t i = lo; i < hi; ++i) all = std::isfinite(found[(i - lo) * k]) && all;
      for (int64_t i = 0; i < (hi - lo) * k; ++i) {
        const double distance = std::sqrt(found[i]);
        if (x.dtype == Dtype::f64) {
          static_cast<double*>(distances)[lo * k + i] = distance;
        } else {
          static_cast<float*>(distances)[lo * k + i] = static_cast<float>(distance);
        }
      }
    }
    if (!all) finite = false;
  });
  require_finite(x, parallel, finite);
}

}  // namespace uefl::cpu
