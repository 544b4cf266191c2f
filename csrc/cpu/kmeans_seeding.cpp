#include "cpu/kmeans_seeding.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/philox.h"
#include "cpu/features.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kRoundsOfDraws = 5;     // rounds of k-means||, with 2 k draws each
constexpr int64_t kMostDigits = 1 << 16;  // largest d for which AMX sums the products in 32 bits

const SeedingKernel& seeding_kernel([[maybe_unused]] int64_t d) {
#if defined(__x86_64__)
  if (isa() == Isa::amx && d <= kMostDigits) return seeding_amx;
#endif
  return pick<&seeding_portable, &seeding_avx2, &seeding_avx512, &seeding_avx512vnni>();
}

// Returns random number t of a round, in [0, 1).
double uniform(int64_t t, int64_t round, int64_t restart, uint32_t purpose, uint64_t seed) {
  const PhiloxWords words = philox(
      {{static_cast<uint32_t>(t), static_cast<uint32_t>(round), static_cast<uint32_t>(restart), purpose}},
      seed);
  return static_cast<double>((uint64_t{words.word[0] >> 5} << 26) + (words.word[1] >> 6)) * 0x1p-53;
}

}  // namespace

Seeder::Seeder(int64_t n, int64_t d, int64_t bits, std::vector<double> weights, std::vector<int16_t> shift,
               const Parallel& parallel)
    : n_(n),
      d_(d),
      bits_(bits),
      parallel_(parallel),
      kernel_(seeding_kernel(d)),
      rows_(((n + 31) / 32 * 32 * kernel_.row_bytes(d) + 63) / 64),
      norms_(n),
      shift_(std::move(shift)),
      weights_(std::move(weights)),
      masses_(weights_.size()) {
  const double mass_scale = std::ldexp(1.0, static_cast<int>(mass_bits(n)));
  const double potential_scale = std::ldexp(1.0, static_cast<int>(60 - 2 * bits - ceil_log2(n * d)));
  for (size_t i = 0; i < weights_.size(); ++i) {
    masses_[i] = std::llrint(weights_[i] * mass_scale);
    weights_[i] *= potential_scale;
  }
}

// Returns how many products of elements fit into a sum of 32 bits. Two products of numbers up to 32,639 fit.
// By the Cauchy-Schwarz inequality, the products of a longer run fit if the squares of the run fit.
int64_t Seeder::run() const {
  int64_t run = 2;
  for (int level = 2; level < kRunLevels; ++level) {
    if (largest_[level] < int64_t{1} << 31) run = int64_t{1} << level;
  }
  return run;
}

std::vector<int64_t> Seeder::seeds(Seeding seeding, int64_t k, uint64_t seed, int64_t restart) const {
  if (seeding == Seeding::random) return random(k, seed, restart);
  return seeding == Seeding::parallel ? oversampled(k, seed, restart) : plus_plus(k, seed, restart, kRows);
}

int64_t Seeder::potential(int64_t i, int64_t square) const {
  if (weights_.empty()) return square << (60 - 2 * bits_ - ceil_log2(n_ * d_));
  return std::llrint(weights_[i] * static_cast<double>(square));
}

Seeder::CandidateGroups::CandidateGroups(const Seeder& seeder, const std::vector<int64_t>& chosen)
    : count(static_cast<int64_t>(chosen.size())),
      groups((count + kGroup - 1) / kGroup),
      packed(groups * seeder.kernel_.group_bytes(seeder.d_) / static_cast<int64_t>(sizeof(CacheLine))),
      norms(groups * kGroup) {
  std::vector<int16_t> values(seeder.d_);
  for (int64_t c = 0; c < count; ++c) {
    char* group = reinterpret_cast<char*>(packed.data()) + c / kGroup * seeder.kernel_.group_bytes(seeder.d_);
    seeder.kernel_.load(seeder.rows(), seeder.d_, chosen[c], values.data());
    seeder.kernel_.pack(values.data(), seeder.d_, c % kGroup, group);
    norms[c] = seeder.norms_[chosen[c]];
  }
}

// Computes the distances of a block of rows to the candidates of a group.
void Seeder::distances(const CandidateGroups& candidates, int64_t group, int64_t block,
                       int64_t* const* out) const {
  kernel_.distances(rows(), norms_.data(), block * kBlock, block_end(block) - block * kBlock, d_, run(),
                    reinterpret_cast<const char*>(candidates.packed.data()) + group * kernel_.group_bytes(d_),
                    &candidates.norms[group * kGroup], std::min(kGroup, candidates.count - group * kGroup),
                    out);
}

template <class Mass>
std::vector<int64_t> Seeder::running_sums(const Mass& mass) const {
  std::vector<int64_t> running(blocks());
  int64_t total = 0;
  for (int64_t block = 0; block < blocks(); ++block) {
    for (int64_t i = block * kBlock; i < block_end(block); ++i) total += mass(i);
    running[block] = total;
  }
  return running;
}

// Returns the first row with a running sum above `number` times the total, or row 0 if all masses are 0.
template <class Mass>
int64_t Seeder::draw(const std::vector<int64_t>& running, double number, const Mass& mass) const {
  const int64_t total = running.back();
  const int64_t target = std::min(static_cast<int64_t>(static_cast<double>(total) * number), total - 1);
  const int64_t block = std::upper_bound(running.begin(), running.end(), target) - running.begin();
  int64_t sum = block == 0 ? 0 : running[block - 1];
  int64_t i = block * kBlock;
  for (; i + 1 < block_end(block); ++i) {
    sum += mass(i);
    if (sum > target) break;
  }
  return i;
}

std::vector<int64_t> Seeder::random(int64_t k, uint64_t seed, int64_t restart) const {
  std::vector<int64_t> left(n_), chosen(k);
  for (int64_t i = 0; i < n_; ++i) left[i] = mass(i);
  const auto mass_left = [&](int64_t i) { return left[i]; };
  std::vector<int64_t> running = running_sums(mass_left);
  for (int64_t i = 0; i < k; ++i) {
    chosen[i] = draw(running, uniform(0, i, restart, kRows, seed), mass_left);
    for (int64_t block = chosen[i] / kBlock; block < blocks(); ++block) running[block] -= left[chosen[i]];
    left[chosen[i]] = 0;
  }
  return chosen;
}

std::vector<int64_t> Seeder::plus_plus(int64_t k, uint64_t seed, int64_t restart, Purpose purpose) const {
  const int64_t trials = 2 + static_cast<int64_t>(std::log(static_cast<double>(k)));
  const int shift = static_cast<int>(60 - 2 * bits_ - ceil_log2(n_ * d_));
  const double* weights = weights_.empty() ? nullptr : weights_.data();
  // The distances to the nearest chosen row, and the distances with each new candidate. The two are swapped.
  std::vector<std::vector<int64_t>> nearest_with(trials, std::vector<int64_t>(n_));
  std::vector<int64_t> nearest(n_, INT64_MAX >> 1), potentials(blocks() * trials), chosen, running(blocks());
  std::vector<char> taken(n_);
  const auto mass_left = [&](int64_t i) { return taken[i] ? 0 : mass(i); };
  const auto potential_of = [&](int64_t i) { return potential(i, nearest[i]); };

  for (int64_t round = 0; round < k; ++round) {
    std::vector<int64_t> drawn(round == 0 ? 1 : trials);
    // If `spread` is false, there are fewer distinct rows than clusters.
    const bool spread = round > 0 && running.back() > 0;
    const std::vector<int64_t> masses = spread ? std::vector<int64_t>() : running_sums(mass_left);
    for (int64_t t = 0; t < static_cast<int64_t>(drawn.size()); ++t) {
      const double number = uniform(t, round, restart, purpose, seed);
      drawn[t] = spread ? draw(running, number, potential_of) : draw(masses, number, mass_left);
    }
    const CandidateGroups candidates(*this, drawn);
    parallel_(blocks(), [&](int64_t lo, int64_t hi) {
      for (int64_t block = lo; block < hi; ++block) {
        const int64_t first = block * kBlock, count = block_end(block) - first;
        for (int64_t g = 0; g < candidates.groups; ++g) {
          int64_t* out[kGroup] = {};
          for (int64_t c = 0; c < kGroup && g * kGroup + c < candidates.count; ++c)
            out[c] = &nearest_with[g * kGroup + c][first];
          distances(candidates, g, block, out);
        }
        for (int64_t c = 0; c < candidates.count; ++c) {
          potentials[block * trials + c] = kmeans_kernel().improve(
              &nearest[first], weights ? weights + first : nullptr, shift, count, &nearest_with[c][first]);
        }
      }
    });
    std::vector<int64_t> total(candidates.count);
    for (int64_t block = 0; block < blocks(); ++block) {
      for (int64_t c = 0; c < candidates.count; ++c) total[c] += potentials[block * trials + c];
    }
    const int64_t best = std::min_element(total.begin(), total.end()) - total.begin();
    std::swap(nearest, nearest_with[best]);
    for (int64_t block = 0, sum = 0; block < blocks(); ++block)
      running[block] = sum += potentials[block * trials + best];
    chosen.push_back(drawn[best]);
    taken[drawn[best]] = 1;
  }
  return chosen;
}

std::vector<int64_t> Seeder::oversampled(int64_t k, uint64_t seed, int64_t restart) const {
  std::vector<int64_t> nearest(n_, INT64_MAX), owner(n_), running(blocks()), drawn;
  const auto mass_of = [&](int64_t i) { return mass(i); };
  const auto potential_of = [&](int64_t i) { return potential(i, nearest[i]); };
  const std::vector<int64_t> masses = running_sums(mass_of);
  for (int64_t round = 0; round <= kRoundsOfDraws; ++round) {
    std::vector<int64_t> fresh(round == 0 ? 1 : 2 * k);
    const bool spread = round > 0 && running.back() > 0;
    for (int64_t t = 0; t < static_cast<int64_t>(fresh.size()); ++t) {
      const double number = uniform(t, round, restart, kRounds, seed);
      fresh[t] = spread ? draw(running, number, potential_of) : draw(masses, number, mass_of);
    }
    const CandidateGroups candidates(*this, fresh);
    const int64_t before = static_cast<int64_t>(drawn.size());
    parallel_(blocks(), [&](int64_t lo, int64_t hi) {
      int64_t found[kGroup][kBlock], *out[kGroup];
      for (int64_t c = 0; c < kGroup; ++c) out[c] = found[c];
      for (int64_t block = lo; block < hi; ++block) {
        const int64_t first = block * kBlock, count = block_end(block) - first;
        for (int64_t g = 0; g < candidates.groups; ++g) {
          distances(candidates, g, block, out);
          for (int64_t c = 0; c < kGroup && g * kGroup + c < candidates.count; ++c) {
            for (int64_t i = 0; i < count; ++i) {
              if (found[c][i] >= nearest[first + i]) continue;
              nearest[first + i] = found[c][i];
              owner[first + i] = before + g * kGroup + c;
            }
          }
        }
        running[block] = 0;
        for (int64_t i = first; i < first + count; ++i) running[block] += potential_of(i);
      }
    });
    std::partial_sum(running.begin(), running.end(), running.begin());
    drawn.insert(drawn.end(), fresh.begin(), fresh.end());
  }
  std::vector<int64_t> owned(drawn.size());
  for (int64_t i = 0; i < n_; ++i) owned[owner[i]] += mass(i);
  std::vector<double> weights(owned.begin(), owned.end());
  const double unit = least_power_of_two(*std::max_element(weights.begin(), weights.end()));
  for (double& weight : weights) weight /= unit;
  Seeder drawn_rows(static_cast<int64_t>(drawn.size()), d_, bits_, std::move(weights), {}, parallel_);
  drawn_rows.store(0, drawn_rows.n_,
                   [&](int64_t i, int16_t* values) { kernel_.load(rows(), d_, drawn[i], values); });
  std::vector<int64_t> chosen = drawn_rows.plus_plus(k, seed, restart, kDrawn);
  for (int64_t& row : chosen) row = drawn[row];
  return chosen;
}

}  // namespace uefl::cpu
