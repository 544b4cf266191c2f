// vq on the CPU: search, gather, squared error and counts in one pass over blocks of rows, per-codeword sums
// in a second one.
//
// Results do not depend on the number of threads: each block owns its error sum, and counts and sums are
// integers. The sums are in 64-bit fixed point, in the units that ops/vq/composed.py defines, so they equal
// it to the bit. A unit may depend on all rows of its codeword, which are known only when every row has been
// searched: hence the second pass.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "cpu/pieces.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {

struct VqOutput {
  void* quantized;   // [N, S * d] in the dtype of x
  int64_t* indices;  // [N, S]
  int64_t* counts;   // [segments, k] of the codebook, zeroed by the caller
  double* sums;      // the same shape with d, or null
};

class Vq {
 public:
  // codes: the codebook in the dtype of x, which is what `quantized` receives. All pointers must outlive the
  // object.
  Vq(const Search& search, const Codebook& codebook, const void* codes, const StridedRows& x,
     const VqOutput& output);

  int64_t blocks() const { return static_cast<int64_t>(errors_.size()); }

  // Blocks [lo, hi): writes quantized and indices, adds to counts. Thread-safe.
  void run(int64_t lo, int64_t hi);

  // With sums only, after run() of all blocks: adds the rows of blocks [lo, hi). Thread-safe.
  void add(int64_t lo, int64_t hi);

  int64_t codes() const { return static_cast<int64_t>(largest_.size()); }

  // After add() of all blocks: writes the sums of codewords [lo, hi). Thread-safe.
  void write_sums(int64_t lo, int64_t hi);

  // At the end: the sum of (x - q)^2, in float64.
  double error() const;

 private:
  int64_t first_row(int64_t block) const;
  int64_t codebook_step() const { return codebook_.segments == 1 ? 0 : codebook_.k; }
  double scale(int64_t code) const;

  const Search& search_;
  const Codebook codebook_;
  const void* codes_;
  const StridedRows x_;
  const VqOutput output_;
  const int64_t rows_, block_rows_;
  std::vector<double> errors_;  // one per block
  std::vector<int64_t>
      largest_;     // per codeword the largest |x| of its rows, as bits: they order like the values, NaN last
  const int bits_;  // of a row, so that all of them add up within 2^62
  std::vector<int> expected_;   // expected_shift() of each codeword; empty without sums
  std::vector<int64_t> fixed_;  // sums in the unit of the codeword
  std::mutex merge_;            // of counts
  Pieces pieces_;               // of the sums
};

}  // namespace uefl::cpu
