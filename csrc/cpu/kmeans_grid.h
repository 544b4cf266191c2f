// Seeding of k-means, on rows as whole numbers: distances and potentials are integers, and so the same whoever adds them up.
// The rules and the counters of the random numbers are those of Grid in ops/kmeans/reference.py.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kmeans.h"
#include "cpu/kmeans_kernel.h"

namespace uefl::cpu {

constexpr int kGridBits = 14;  // of a whole number, beside its sign

struct alignas(64) GridLine {
  char bytes[64];
};

class Grid {
 public:
  // Memory for n rows of d elements; weights: at most 1, or empty for ones.
  Grid(int64_t n, int64_t d, int64_t bits, std::vector<double> weights, const Parallel& parallel);

  // To be called for each row before anything else. Thread-safe for different rows.
  void store(int64_t row, const int16_t* values);

  // Which k rows a fit begins with.
  std::vector<int64_t> seeds(Seeding seeding, int64_t k, uint64_t seed, int64_t restart) const;

 private:
  enum Stage : uint32_t { kRows, kRounds, kDrawn };

  std::vector<int64_t> random(int64_t k, uint64_t seed, int64_t restart) const;
  std::vector<int64_t> plus_plus(int64_t k, uint64_t seed, int64_t restart, Stage stage) const;
  std::vector<int64_t> oversampled(int64_t k, uint64_t seed, int64_t restart) const;

  // Groups of candidates, packed: rows chosen[0], chosen[1], ...
  struct Candidates {
    Candidates(const Grid& grid, const std::vector<int64_t>& chosen);
    int64_t groups;
    std::vector<GridLine> packed;
    std::vector<int64_t> norms;
  };

  // Running sums of masses over blocks of rows, to draw from.
  template <class Mass>
  int64_t draw(const std::vector<int64_t>& running, double number, const Mass& mass) const;
  template <class Mass>
  std::vector<int64_t> running_sums(const Mass& mass) const;

  const char* rows() const { return reinterpret_cast<const char*>(rows_.data()); }
  int64_t blocks() const { return (n_ + kBlock - 1) / kBlock; }
  int64_t block_end(int64_t block) const { return block * kBlock + kBlock < n_ ? block * kBlock + kBlock : n_; }
  int64_t mass(int64_t i) const { return masses_.empty() ? int64_t{1} << mass_bits(n_) : masses_[i]; }
  int64_t potential(int64_t i, int64_t square) const;

  static constexpr int64_t kBlock = 256;  // rows whose distances stay in the first-level cache

  const int64_t n_, d_, bits_;
  const Parallel& parallel_;
  const GridKernel& kernel_;
  std::vector<GridLine> rows_;
  std::vector<int64_t> norms_;
  std::vector<double> weights_;  // those of the potentials: weight * 2^shift
  std::vector<int64_t> masses_;  // or empty: all the same
};

}  // namespace uefl::cpu
