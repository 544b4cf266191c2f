// Seeding of k-means, on rows as whole numbers: distances and potentials are integers, and so the same
// whoever adds them up. The rules and the counters of the random numbers are those of Grid in
// ops/kmeans/reference.py.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "cpu/kmeans.h"
#include "cpu/kmeans_kernel.h"
#include "cpu/kmeans_seeding_kernel.h"

namespace uefl::cpu {

constexpr int kSeedingBits = 14;  // of a whole number, beside its sign
constexpr int16_t kMostShift = 32639 - (1 << kSeedingBits);

struct alignas(64) SeedingLine {
  char bytes[64];
};

class Seeder {
 public:
  // Memory for n rows of d elements; weights: at most 1, or empty for ones. shift [d], of magnitudes up to
  // kMostShift, or empty: what rows are stored without. No distance depends on it, but short rows can be
  // multiplied in fewer bits.
  Seeder(int64_t n, int64_t d, int64_t bits, std::vector<double> weights, std::vector<int16_t> shift,
         const Parallel& parallel);

  // To be called for all rows before anything else: row(i, values) gives row i, [d]. Thread-safe for
  // different rows.
  template <class Row>
  void store(int64_t lo, int64_t hi, const Row& row);

  // Which k rows a fit begins with.
  std::vector<int64_t> seeds(Seeding seeding, int64_t k, uint64_t seed, int64_t restart) const;

 private:
  enum Stage : uint32_t { kRows, kRounds, kDrawn };

  std::vector<int64_t> random(int64_t k, uint64_t seed, int64_t restart) const;
  std::vector<int64_t> plus_plus(int64_t k, uint64_t seed, int64_t restart, Stage stage) const;
  std::vector<int64_t> oversampled(int64_t k, uint64_t seed, int64_t restart) const;

  // Groups of candidates, packed: rows chosen[0], chosen[1], ...
  struct Candidates {
    Candidates(const Seeder& seeder, const std::vector<int64_t>& chosen);
    int64_t count, groups;
    std::vector<SeedingLine> packed;
    std::vector<int64_t> norms;
  };

  // Running sums of masses over blocks of rows, to draw from.
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
  void distances(const Candidates& candidates, int64_t group, int64_t block, int64_t* const* out) const;
  int64_t run() const;

  static constexpr int64_t kBlock = 256;  // rows whose distances stay in the first-level cache

  const int64_t n_, d_, bits_;
  const Parallel& parallel_;
  const SeedingKernel& kernel_;
  std::vector<SeedingLine> rows_;
  std::vector<int64_t> norms_;
  const std::vector<int16_t> shift_;
  std::mutex merge_;
  std::array<int64_t, kRunLevels> largest_{};  // sums of squares, for run()
  std::vector<double> weights_;                // those of the potentials: weight * 2^shift
  std::vector<int64_t> masses_;                // or empty: all the same
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
