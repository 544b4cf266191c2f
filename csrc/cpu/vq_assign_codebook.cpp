// Prepares a codebook for a search: converts it to float64, subtracts its mean, and packs it for the phases
// of the plan. All of this runs in parallel. The large arrays are allocated without zeros, so that the
// threads touch the memory first.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "cpu/vq_assign.h"
#include "cpu/vq_assign_few.h"
#include "cpu/vq_prefilter.h"

namespace uefl::cpu {
namespace {

// Returns the largest value, or infinity if a value is not finite, for example after the mean overflowed.
double largest_of(const std::vector<double>& values) {
  const bool finite =
      std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
  return finite ? *std::max_element(values.begin(), values.end()) : std::numeric_limits<double>::infinity();
}

// Writes values in float64. Returns false if one is NaN or above kLargest.
template <class T>
bool widen_all(const T* values, int64_t count, double* out) {
  double wrong[4] = {};
  const auto four = [&](int64_t start, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const double value = static_cast<double>(widen(values[start + i]));
      out[start + i] = value;
      wrong[i] += std::abs(value) <= kLargest ? 0.0 : 1.0;
    }
  };
  const int64_t whole = count / 4 * 4;
  for (int64_t j = 0; j < whole; j += 4) four(j, 4);
  four(whole, count - whole);
  return (wrong[0] + wrong[1]) + (wrong[2] + wrong[3]) == 0;
}

float largest_size(const float* values, int64_t count) {
  float largest[4] = {};
  const auto four = [&](int64_t start, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const float size = std::fabs(values[start + i]);
      largest[i] = largest[i] < size ? size : largest[i];
    }
  };
  const int64_t whole = count / 4 * 4;
  for (int64_t j = 0; j < whole; j += 4) four(j, 4);
  four(whole, count - whole);
  return std::max({largest[0], largest[1], largest[2], largest[3]});
}

}  // namespace

Search::Search(const Codebooks& codebooks, Metric metric, bool exact, const std::string& op,
               const Parallel& parallel, bool few)
    : codebooks_(codebooks),
      metric_(metric),
      exact_(exact),
      few_(few),
      op_(few ? op : std::string()),
      parallel_(few ? parallel : Parallel()),
      k_(codebooks.k),
      d_(codebooks.d),
      plan_(plan(d_, k_)),
      blocks_((k_ + plan_.kernel->block_codewords - 1) / plan_.kernel->block_codewords),
      codewords_(new double[codebooks.count * k_ * d_]),
      units_(metric == Metric::cosine && !few ? new double[codebooks.count * k_ * d_] : nullptr),
      prepared_(codebooks.count) {
  if (few_) return;  // each codeword is checked with its scores
  check_blocks(plan_);
  std::atomic<bool> valid = true;
  parallel(codebooks.count * k_, [&](int64_t lo, int64_t hi) {
    with_type(codebooks.dtype, [&]<class T>(const T*) {
      const T* const data = static_cast<const T*>(codebooks.data);
      if (!widen_all(data + lo * d_, (hi - lo) * d_, codewords_.get() + lo * d_)) valid = false;
    });
    for (int64_t k = lo; k < hi && units_; ++k) to_unit(&codewords_[k * d_], d_, &units_[k * d_]);
  });
  require(valid, op);
  for (int64_t s = 0; s < codebooks.count; ++s) {
    prepared_[s].codewords = (units_ ? units_ : codewords_).get() + s * k_ * d_;
    if (!plan_.direct) prepare(prepared_[s], parallel);
  }
}

void Search::require(bool valid, const std::string& op) {
  if (valid) return;
  throw std::runtime_error(op +
                           ": the codebook holds NaN, infinity or values beyond 2^480 (3e144); initialize "
                           "those codewords again, or lower the learning rate");
}

// Packs every codeword into its lane of a block. pack_codeword(k, block) returns the squared error of the
// codeword's first part.
template <class PackCodeword>
void Search::pack(Panels& panels, int64_t block_bytes, const Parallel& parallel,
                  const PackCodeword& pack_codeword) const {
  const int64_t lines = block_bytes / static_cast<int64_t>(sizeof(CacheLine)),
                block = plan_.kernel->block_codewords;
  panels.lines.reset(new CacheLine[blocks_ * lines]);
  std::vector<double> rest(k_);
  parallel(blocks_, [&](int64_t lo, int64_t hi) {
    std::fill(&panels.lines[lo * lines], &panels.lines[hi * lines], CacheLine{});
    for (int64_t k = lo * block; k < std::min(hi * block, k_); ++k)
      rest[k] = pack_codeword(k, &panels.lines[k / block * lines]);
  });
  panels.rest_radius = std::sqrt(largest_of(rest));
}

// Computes codeword k minus the mean. Returns its squared length.
double Search::center(const PreparedCodebook& codebook, int64_t k, float* code) const {
  const double* codeword = codebook.codewords + k * d_;
  const float* mean = codebook.mean.data();
  double square[4] = {};
  const auto four = [&](int64_t start, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double value = codeword[start + i] - mean[start + i];
      code[start + i] = static_cast<float>(value);
      square[i] += value * value;
    }
  };
  const int64_t whole = d_ / 4 * 4;
  for (int64_t j = 0; j < whole; j += 4) four(j, 4);
  four(whole, d_ - whole);
  return (square[0] + square[1]) + (square[2] + square[3]);
}

// Returns the mean of the codewords, or zeros for cosine. The portions of the sum do not depend on the number
// of threads.
std::vector<float> Search::mean(const PreparedCodebook& codebook, const Parallel& parallel) const {
  constexpr int64_t kPortion = 512;  // codewords
  const int64_t portions = metric_ == Metric::l2 ? (k_ + kPortion - 1) / kPortion : 0;
  std::vector<double> sums(portions * d_), sum(d_);
  parallel(portions, [&](int64_t lo, int64_t hi) {
    for (int64_t k = lo * kPortion; k < std::min(hi * kPortion, k_); ++k) {
      for (int64_t j = 0; j < d_; ++j) sums[k / kPortion * d_ + j] += codebook.codewords[k * d_ + j];
    }
  });
  for (size_t i = 0; i < sums.size(); ++i) sum[i % d_] += sums[i];
  std::vector<float> mean(d_);
  for (int64_t j = 0; j < d_; ++j) mean[j] = static_cast<float>(sum[j] / static_cast<double>(k_));
  return mean;
}

void Search::prepare(PreparedCodebook& codebook, const Parallel& parallel) const {
  codebook.mean = mean(codebook, parallel);
  const PrefilterKernel* prefilter = plan_.prefilter;
  const int64_t pitch = centered_pitch(d_);
  if (prefilter) codebook.centered.reset(new float[k_ * pitch]);
  codebook.half_squares.assign(blocks_ * plan_.kernel->block_codewords,
                               std::numeric_limits<float>::infinity());
  std::vector<double> square(k_);
  std::vector<float> largest(k_);
  parallel(k_, [&](int64_t lo, int64_t hi) {
    std::vector<float> memory(prefilter ? 0 : d_);
    for (int64_t k = lo; k < hi; ++k) {
      float* code = prefilter ? &codebook.centered[k * pitch] : memory.data();
      square[k] = center(codebook, k, code);
      codebook.half_squares[k] = static_cast<float>(metric_ == Metric::l2 ? square[k] / 2 : 0);
      std::fill(code + d_, code + (prefilter ? pitch : d_), 0.0f);
      largest[k] = largest_size(code, d_);
    }
  });
  const double most = largest_of(square);
  codebook.half_square = metric_ == Metric::l2 ? most / 2 : 0;
  codebook.radius = std::sqrt(most);
  if (!prefilter) {
    fine(codebook, parallel);
    return;
  }
  codebook.unit =
      fixed_unit(static_cast<float>(codebook.radius), *std::max_element(largest.begin(), largest.end()));
  pack(codebook.prefilter, prefilter->block_bytes(d_), parallel, [&](int64_t k, void* block) {
    return prefilter->pack(&codebook.centered[k * pitch], d_, codebook.unit, k % prefilter->block_codewords,
                           block);
  });
}

// Returns the codewords packed for the kernel. If there is a prefilter, the first thread that needs them
// packs them.
const Search::Panels& Search::fine(const PreparedCodebook& codebook, const Parallel& parallel) const {
  std::call_once(codebook.fine_once, [&] {
    const VqAssignKernel& kernel = *plan_.kernel;
    pack(codebook.fine, kernel.block_bytes(d_), parallel, [&](int64_t k, void* block) {
      std::vector<float> code(d_);
      center(codebook, k, code.data());
      return kernel.pack(code.data(), d_, k % kernel.block_codewords, block);
    });
  });
  return codebook.fine;
}

}  // namespace uefl::cpu
