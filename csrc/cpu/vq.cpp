#include "cpu/vq.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cpu/features.h"
#include "cpu/vq_kernel.h"

namespace uefl::cpu {
namespace {

const VqKernel& kernel() { return pick<&vq_portable, &vq_avx2, &vq_avx512>(); }

// Returns the least e >= -900 with value < 2^e.
int exponent_of(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::max(exponent, -900);
}

}  // namespace

Vq::Vq(const Search& search, const Codebooks& codebooks, const void* codewords, const StridedRows& x,
       const VqOutput& output)
    : search_(search),
      codebooks_(codebooks),
      codewords_(codewords),
      x_(search.flatten_segments(x)),
      output_(output),
      rows_(x_.outer * x_.inner),
      block_rows_(search.block_rows(x_.dim)),
      errors_((rows_ + block_rows_ - 1) / block_rows_),
      largest_(codebooks.count * codebooks.k),
      bits_(62 -
            std::bit_width(static_cast<uint64_t>(std::max<int64_t>(rows_ * (x_.dim / codebooks.d), 1) - 1))),
      fixed_(output.sums ? codebooks.count * codebooks.k * codebooks.d : 0) {
  if (!output.sums) return;
  constexpr int kRoom = 3;
  const double* codeword = search.codewords();
  for (size_t code = 0; code < largest_.size(); ++code, codeword += codebooks.d) {
    double reach = 0;
    for (int64_t j = 0; j < codebooks.d; ++j) reach = std::max(reach, std::abs(codeword[j]));
    expected_.push_back(bits_ - exponent_of(reach) - kRoom);
  }
}

int64_t Vq::first_row(int64_t block) const { return std::min(rows_, block * block_rows_); }

void Vq::run(int64_t lo, int64_t hi) {
  std::vector<int64_t> counts(largest_.size()), largest(largest_.size());
  const int64_t segments = x_.dim / codebooks_.d, row_bytes = x_.dim * element_size(x_.dtype);
  char* const quantized = static_cast<char*>(output_.quantized);
  RowBuffer buffer(x_);
  Search::Scratch scratch(search_);
  for (int64_t block = lo; block < hi; ++block) {
    const int64_t first = first_row(block), rows = first_row(block + 1) - first;
    const BufferedRows x = buffer.read(first, first + rows);
    int64_t* indices = output_.indices + first * segments;
    search_.assign(x.rows, x.first, x.first + rows, indices - x.first * segments, scratch);
    errors_[block] = kernel().replace({.x = x,
                                       .rows = rows,
                                       .d = codebooks_.d,
                                       .codebook_step = codebook_step(),
                                       .indices = indices,
                                       .codewords = static_cast<const char*>(codewords_),
                                       .exact = search_.codewords(),
                                       .quantized = quantized ? quantized + first * row_bytes : nullptr,
                                       .counts = counts.data(),
                                       .largest = largest.data()});
  }
  const std::lock_guard<std::mutex> lock(merge_);
  for (size_t code = 0; code < largest.size(); ++code) {
    output_.counts[code] += counts[code];
    largest_[code] = std::max(largest_[code], largest[code]);
  }
}

// Returns 2^shift of expected_shift() and fixed_point() in ops/vq/composed.py. With this factor, the sum of N
// rows, each below 2^exponent, stays below 2^62. Returns zero for a codeword with a row that is not finite.
double Vq::scale(int64_t code) const {
  constexpr int kLeast = 31;
  const double largest = std::bit_cast<double>(largest_[code]);
  if (!std::isfinite(largest)) return 0;
  const int needed = bits_ - exponent_of(largest), spare = needed - expected_[code];
  return std::ldexp(1.0, spare >= 0 && spare <= bits_ - kLeast ? expected_[code] : needed);
}

void Vq::add(int64_t lo, int64_t hi) {
  std::vector<double> scales(largest_.size());
  for (size_t code = 0; code < scales.size(); ++code) scales[code] = scale(static_cast<int64_t>(code));
  std::vector<int64_t> fixed(fixed_.size());
  RowBuffer buffer(x_);
  for (int64_t block = lo; block < hi; ++block) {
    const int64_t first = first_row(block), rows = first_row(block + 1) - first;
    kernel().add({.x = buffer.read(first, first + rows),
                  .rows = rows,
                  .d = codebooks_.d,
                  .codebook_step = codebook_step(),
                  .indices = output_.indices + first * (x_.dim / codebooks_.d),
                  .scales = scales.data(),
                  .fixed = fixed.data()});
  }
  adder_.add(fixed, fixed_);
}

void Vq::write_sums(int64_t lo, int64_t hi) {
  const int64_t d = codebooks_.d;
  for (int64_t code = lo; code < hi; ++code) {
    const double scale = this->scale(code);
    for (int64_t i = code * d; i < (code + 1) * d; ++i) {
      output_.sums[i] =
          scale > 0 ? static_cast<double>(fixed_[i]) / scale : std::numeric_limits<double>::quiet_NaN();
    }
  }
}

double Vq::error() const {
  double error = 0;
  for (const double block : errors_) error += block;
  return error;
}

void vq_backward(const VqBackward& given, int64_t lo, int64_t hi) {
  RowBuffer x(given.x), grad_quantized(given.grad_quantized), grad_x(given.grad_x);
  const int64_t step = RowBuffer::rows_for(given.x.dim);
  for (int64_t first = lo; first < hi; first += step) {
    const int64_t last = std::min(first + step, hi);
    VqBackwardRun run{.x = x.read(first, last),
                      .grad_quantized = {},
                      .grad_x = grad_x.place(first, last),
                      .rows = last - first,
                      .d = given.d,
                      .codebook_step = given.codebook_step,
                      .indices = given.indices + first * (given.x.dim / given.d),
                      .codewords = given.codewords,
                      .wide = given.wide,
                      .rotation = given.rotation,
                      .pull = given.pull};
    if (given.grad_quantized.data) run.grad_quantized = grad_quantized.read(first, last);
    kernel().backward(run);
    grad_x.write();
  }
}

}  // namespace uefl::cpu
