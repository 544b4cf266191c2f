#include "cpu/vq.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/features.h"
#include "cpu/vq_kernel.h"

namespace uefl::cpu {
namespace {

const VqKernel& kernel() {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512) return vq_avx512;
  if (isa() == Isa::avx2) return vq_avx2;
#endif
  return vq_portable;
}

}  // namespace

Vq::Vq(const Search& search, const Codebook& codebook, const void* codes, const Rows& x, const VqOutput& output)
    : search_(search),
      codebook_(codebook),
      codes_(codes),
      x_(search.flatten_segments(x)),
      output_(output),
      rows_(x_.outer * x_.inner),
      block_rows_(search.block_rows(x_.dim)),
      errors_((rows_ + block_rows_ - 1) / block_rows_),
      fixed_(output.sums ? codebook.segments * codebook.k * codebook.d : 0) {}

int64_t Vq::first_row(int64_t block) const { return std::min(rows_, block * block_rows_); }

void Vq::measure(int64_t lo, int64_t hi) {
  const int64_t bits = kernel().largest(x_, first_row(lo), first_row(hi));
  const std::lock_guard<std::mutex> lock(merge_);
  largest_bits_ = std::max(largest_bits_, bits);
}

// As code_sums: N rows below 2^e each, in units of 2^-shift, cannot exceed 2^62.
int64_t Vq::shift() const {
  const uint64_t terms = static_cast<uint64_t>(rows_ * (x_.dim / codebook_.d));
  int exponent;
  std::frexp(std::bit_cast<double>(largest_bits_), &exponent);
  return 62 - static_cast<int64_t>(std::bit_width(terms - 1)) - std::max(exponent, -900);
}

void Vq::run(int64_t lo, int64_t hi) {
  const int64_t codes = codebook_.segments * codebook_.k;
  std::vector<int64_t> counts(codes), fixed(fixed_.size());
  VqRun run{.x = x_,
            .lo = 0,
            .hi = 0,
            .d = codebook_.d,
            .codebook_step = codebook_.segments == 1 ? 0 : codebook_.k,
            .indices = output_.indices,
            .codes = static_cast<const char*>(codes_),
            .exact = search_.codes(),
            .quantized = static_cast<char*>(output_.quantized),
            .counts = counts.data(),
            .fixed = output_.sums ? fixed.data() : nullptr,
            .scale = output_.sums ? std::ldexp(1.0, static_cast<int>(shift())) : 0};
  for (int64_t block = lo; block < hi; ++block) {
    run.lo = first_row(block), run.hi = first_row(block + 1);
    search_.assign(x_, run.lo, run.hi, output_.indices);
    errors_[block] = kernel().replace(run);
  }
  const std::lock_guard<std::mutex> lock(merge_);
  for (int64_t i = 0; i < codes; ++i) output_.counts[i] += counts[i];
  for (size_t i = 0; i < fixed.size(); ++i) fixed_[i] += fixed[i];
}

double Vq::finish() {
  if (output_.sums) {
    const double unit = rows_ > 0 ? std::ldexp(1.0, static_cast<int>(-shift())) : 0;
    for (size_t i = 0; i < fixed_.size(); ++i) output_.sums[i] = static_cast<double>(fixed_[i]) * unit;
  }
  double error = 0;
  for (const double block : errors_) error += block;
  return error;
}

}  // namespace uefl::cpu
