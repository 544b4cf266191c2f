// vq on the CPU. Each block of rows is read once: this searches, gathers, and sums squared errors and counts.
// A second pass sums the rows of each codeword.
//
// Results do not depend on the number of threads: each block has its own error sum, and counts and sums are
// integers. The sums are 64-bit fixed-point numbers in the units of ops/vq/composed.py, so both agree bit for
// bit. The unit of a codeword may depend on all its rows, which are known only after the search. So the sums
// need a second pass.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "cpu/striped_adder.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {

struct VqOutput {
  void* quantized;   // [N, S * d] in the dtype of x, or null
  int64_t* indices;  // [N, S]
  int64_t* counts;   // [codebooks, k] of the codebook, zeroed by the caller
  double* sums;      // [codebooks, k, d], or null
};

class Vq {
 public:
  // `codewords` is the codebook in the dtype of x, the source of `quantized`. All pointers must outlive the
  // object.
  Vq(const Search& search, const Codebooks& codebooks, const void* codewords, const StridedRows& x,
     const VqOutput& output);

  int64_t blocks() const { return static_cast<int64_t>(errors_.size()); }

  // Writes quantized and indices of blocks [lo, hi), and adds to counts. Thread-safe.
  void run(int64_t lo, int64_t hi);

  // Adds the rows of blocks [lo, hi) to the sums, after run() of all blocks. Thread-safe. For sums only.
  void add(int64_t lo, int64_t hi);

  int64_t codeword_count() const { return static_cast<int64_t>(largest_.size()); }

  // Writes the sums of codewords [lo, hi), after add() of all blocks. Thread-safe.
  void write_sums(int64_t lo, int64_t hi);

  // Returns the sum of (x - q)^2 in float64, after run() of all blocks.
  double error() const;

 private:
  int64_t first_row(int64_t block) const;
  int64_t codebook_step() const { return codebooks_.count == 1 ? 0 : codebooks_.k; }
  double scale(int64_t code) const;

  const Search& search_;
  const Codebooks codebooks_;
  const void* codewords_;
  const StridedRows x_;
  const VqOutput output_;
  const int64_t rows_, block_rows_;
  std::vector<double> errors_;    // one per block
  std::vector<int64_t> largest_;  // for each codeword the largest |x| of its rows, as bits, which order as
                                  // the values do, with NaN last
  const int bits_;                // bits per row, so that all rows sum to at most 2^62
  std::vector<int> expected_;     // expected_shift() of each codeword; empty without sums
  std::vector<int64_t> fixed_;    // sums in the unit of the codeword
  std::mutex merge_;              // guards counts
  StripedAdder adder_;            // adds to fixed_
};

}  // namespace uefl::cpu
