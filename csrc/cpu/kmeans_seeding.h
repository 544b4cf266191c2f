// Seeding of k-means on integer rows. Distances and potentials are integers, so the order of additions does
// not matter. Grid in ops/kmeans/grid.py defines the rules and the random counters.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "cpu/cache_line.h"
#include "cpu/kmeans.h"
#include "cpu/kmeans_kernel.h"
#include "cpu/kmeans_seeding_kernel.h"
#include "cpu/large_vector.h"

namespace uefl::cpu {

constexpr int kSeedingBits = 14;  // bits of an integer, without its sign
constexpr int16_t kMostShift = 32639 - (1 << kSeedingBits);

class Seeder {
 public:
  // Allocates memory for n rows of d elements. weights are at most 1, or empty for ones. shift [d], with
  // magnitudes up to kMostShift, is subtracted from the stored rows, unless it is empty. The distances do not
  // depend on the shift. If the shift makes the elements smaller, more products fit into 32 bits: see run().
  Seeder(int64_t n, int64_t d, int64_t bits, std::vector<double> weights, std::vector<int16_t> shift,
         const Parallel& parallel);

  // Writes all rows; call it first. row(i, values) writes row i, [d]. Thread-safe for disjoint rows.
  template <class Row>
  void store(int64_t lo, int64_t hi, const Row& row);

  // Returns the k rows that a fit begins with.
  std::vector<int64_t> seeds(Seeding seeding, int64_t k, uint64_t seed, int64_t restart) const;

 private:
  // The purpose of a draw. Each purpose has its own random numbers.
  enum Purpose : uint32_t { kRows, kRounds, kDrawn };

  std::vector<int64_t> random(int64_t k, uint64_t seed, int64_t restart) const;
  std::vector<int64_t> plus_plus(int64_t k, uint64_t seed, int64_t restart, Purpose purpose) const;
  std::vector<int64_t> oversampled(int64_t k, uint64_t seed, int64_t restart) const;

  // Packed groups of candidates, which are rows chosen[0], chosen[1], ...
  struct CandidateGroups {
    CandidateGroups(const Seeder& seeder, const std::vector<int64_t>& chosen);
    int64_t count, groups;
    std::vector<CacheLine> packed;
    std::vector<int64_t> norms;
  };

  // Running sums of masses over blocks of rows, from which rows are drawn.
  template <class Mass>
  int64_t draw(const std::vector<int64_t>& running, double number, const Mass& mass) const;
  template <class Mass>
  std::vector<int64_t> running_sums(const Mass& mass) const;

  const char* rows() const { return reinterpret_cast<const char*>(rows_.data()); }
  int64_t blocks() const { return (n_ + kBlock - 1) / kBlock; }
  int64_t block_end(int64_t block) const {
    return block * kBlock + kBlock < n_ ? block * kBlock + kBlock : n_;
  }
  int64_t mass(int64_t i) const { return masses_.empty() ? int64_t{1} << mass_bits(n_) : masses_[i]; }
  int64_t potential(int64_t i, int64_t square) const;
  void distances(const CandidateGroups& candidates, int64_t group, int64_t block, int64_t* const* out) const;
  int64_t run() const;

  static constexpr int64_t kBlock = 256;  // rows of a block; their distances stay in the first-level cache

  const int64_t n_, d_, bits_;
  const Parallel& parallel_;
  const SeedingKernel& kernel_;
  LargeVector<CacheLine> rows_;
  std::vector<int64_t> norms_;
  const std::vector<int16_t> shift_;
  std::mutex merge_;
  std::array<int64_t, kRunLevels> largest_{};  // sums of squares, for run()
  std::vector<double> weights_;                // weight * 2^shift, for the potentials
  std::vector<int64_t> masses_;                // empty: all equal
};

template <class Row>
void Seeder::store(int64_t lo, int64_t hi, const Row& row) {
  std::vector<int16_t> values((d_ + 3) / 4 * 4);
  std::array<int64_t, kRunLevels> largest{};
  for (int64_t i = lo; i < hi; ++i) {
    row(i, values.data());
    for (size_t j = 0; j < shift_.size(); ++j) values[j] = static_cast<int16_t>(values[j] - shift_[j]);
    norms_[i] = kmeans_kernel().squares(values.data(), d_, largest.data());
    kernel_.store(values.data(), d_, i, reinterpret_cast<char*>(rows_.data()));
  }
  const std::lock_guard<std::mutex> lock(merge_);
  for (int level = 0; level < kRunLevels; ++level)
    largest_[level] = std::max(largest_[level], largest[level]);
}

}  // namespace uefl::cpu
