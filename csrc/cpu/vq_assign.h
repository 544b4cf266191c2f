// vq_assign on the CPU: the index of the nearest codeword of every segment of every row, exactly.
//
// The answer is defined in float64 (see Search::canonical): terms rounded and added in the order of the elements, ties to the
// lowest index, NaN never wins. Most rows never get there:
//   1. score all codewords of a tile of rows in float32, keeping best and second best (vq_assign_kernel.h, per instruction set);
//   2. accept the best where the gap exceeds the error bound of common/certificate.h;
//   3. score the other rows again and evaluate the few codewords within the bound of the best by the definition.
// So the result depends on the row alone: not on the instruction set, the tile, the batch or the number of threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/rows.h"

namespace uefl::cpu {

enum class Metric { l2, cosine };

// Contiguous [segments, k, d]; one segment codebook serves all segments of x when segments == 1.
struct Codebook {
  const void* data;
  Dtype dtype;
  int64_t segments, k, d;
};

// Rows and codewords scored together by the variant in use.
struct TileShape {
  int64_t rows, lanes;
};
TileShape tile_shape();

// Rows to a block of work: a function of the shape only, so that per-block results do not depend on the threads.
int64_t block_rows(int64_t dim, int64_t k);

// A codebook prepared for one call.
class Search {
 public:
  // Copies what it needs. exact = false skips steps 2 and 3. Throws std::runtime_error, which names the op, when the codebook is
  // not finite.
  Search(const Codebook& codebook, Metric metric, bool exact, const std::string& op = "vq_assign");

  // Rows [lo, hi) of x, whose dim is S * d, into indices[n * S + s]. Safe to call from several threads.
  void assign(const Rows& x, int64_t lo, int64_t hi, int64_t* indices) const;

  // The codewords in float64, [segments, k, d].
  const double* codes() const { return codes_.data(); }

  // x with one shared codebook, its segments seen as rows where strides allow it: fuller tiles, the same results.
  Rows flatten_segments(const Rows& x) const;

  int64_t block_rows(int64_t dim) const { return cpu::block_rows(dim, k_); }

 private:
  struct alignas(64) Line {
    float values[16];
  };
  struct Segment {
    std::vector<float> mean;         // [d]
    std::vector<Line> panels;        // [blocks][d][lanes]: codewords less the mean, transposed, zero where there is none
    std::vector<Line> half_squares;  // [blocks * lanes]: infinity where there is no codeword
    double half_square, radius;      // the largest h and |b| of common/certificate.h
    const double* targets;           // [k, d]: what canonical() compares with: the codewords, or those of length one for cosine
  };

  void pack(Segment& segment) const;
  void rescore(const Rows& x, int64_t s, const Segment& segment, const std::vector<int64_t>& flagged, int64_t* indices) const;
  double error_bound(const Segment& segment, double square) const;
  double canonical(const double* row, const double* target) const;

  Metric metric_;
  bool exact_;
  int64_t k_, d_, blocks_;
  std::vector<double> codes_, units_;
  std::vector<Segment> segments_;
};

}  // namespace uefl::cpu
