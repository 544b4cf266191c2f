// vq on the CPU: search, gather, squared error, counts and per-codeword sums in one pass over blocks of rows.
//
// Results do not depend on the number of threads: each block owns its error sum, and counts and sums are integers. The sums
// are in 64-bit fixed point with the unit that `code_sums` of ops/vq/reference.py defines, so they equal it to the bit.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

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
  // codes: the codebook in the dtype of x, which is what `quantized` receives. All pointers must outlive the object.
  Vq(const Search& search, const Codebook& codebook, const void* codes, const Rows& x, const VqOutput& output);

  int64_t blocks() const { return static_cast<int64_t>(errors_.size()); }

  // With sums only, before run(): the largest finite |x| of blocks [lo, hi). Thread-safe.
  void measure(int64_t lo, int64_t hi);

  // Blocks [lo, hi): writes quantized and indices, adds to counts and sums. Thread-safe.
  void run(int64_t lo, int64_t hi);

  // After run(): writes sums and returns the sum of (x - q)^2, in float64.
  double finish();

 private:
  int64_t first_row(int64_t block) const;
  int64_t shift() const;

  const Search& search_;
  const Codebook codebook_;
  const void* codes_;
  const Rows x_;
  const VqOutput output_;
  const int64_t rows_, block_rows_;
  std::vector<double> errors_;  // one per block
  std::vector<int64_t> fixed_;  // sums in units of 2^-shift
  int64_t largest_bits_ = 0;    // |x| as bits, which order like the values
  std::mutex merge_;
};

}  // namespace uefl::cpu
