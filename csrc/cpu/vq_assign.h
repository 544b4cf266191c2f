// vq_assign on the CPU: the index of the nearest codeword of every segment of every row, exactly.
//
// The answer is defined in float64 (see Search::canonical): terms rounded and added in the order of the
// elements, ties to the lowest index, NaN never wins. Most rows never get there:
//   1. score all codewords of a tile of rows in float32 or three bfloat16 products, keeping best and second
//   best (vq_assign_kernel.h,
//      per instruction set);
//   2. accept the best where the gap exceeds the error bound of common/certificate.h;
//   3. score the other rows again and evaluate the few codewords within the bound of the best by the
//   definition.
// Long codewords are scored in half the bits before that (vq_prefilter.h): only rows with many codewords
// within the larger bound go on to 1. Where few codewords are left, each of them is scored in float32, and
// those that are still possible are evaluated by the definition. So the result depends on the row alone: not
// on the instruction set, the tile, the batch or the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/features.h"
#include "cpu/strided_rows.h"
#include "cpu/threads.h"

namespace uefl::cpu {

enum class Metric { l2, cosine };

// Of an element of a codebook, or of what is clustered: the squares of 2^60 of them add up in float64.
constexpr double kLargest = 0x1p480;

// Contiguous [segments, k, d]; one segment codebook serves all segments of x when segments == 1.
struct Codebook {
  const void* data;
  Dtype dtype;
  int64_t segments, k, d;
};

struct PrefilterKernel;
struct VqAssignKernel;
struct RowSize;

// What searches codewords of d elements among k: the variant in use, or a simpler one where that is faster.
struct Plan {
  Isa isa;
  const VqAssignKernel* kernel;
  const PrefilterKernel* prefilter;  // before the kernel, or null
};
Plan plan(int64_t d, int64_t k);
// Throws std::logic_error unless both passes of a plan take blocks of the same number of codewords: they
// share half_squares.
void check_blocks(const Plan& plan);

// Rows to a block of work: a function of the shape only, so that per-block results do not depend on the
// threads.
int64_t block_rows(int64_t dim, int64_t k);

// A codebook prepared for one call.
class Search {
 public:
  // Copies what it needs. exact = false skips steps 2 and 3 and what is done in float64. Throws
  // std::runtime_error, which names the op, when the codebook is not finite or beyond kLargest.
  Search(const Codebook& codebook, Metric metric, bool exact, const std::string& op = "vq_assign",
         const Parallel& parallel = on_this_thread);

  // Memory for the searches of one thread: pages that the operating system would otherwise give anew to every
  // call.
  class Scratch;

  // Rows [lo, hi) of x, whose dim is S * d, into indices[n * S + s]. Safe to call from several threads, each
  // with a scratch of its own. Long runs of rows are faster: uncertain ones are scored again together.
  void assign(const StridedRows& x, int64_t lo, int64_t hi, int64_t* indices, Scratch& scratch) const;
  void assign(const StridedRows& x, int64_t lo, int64_t hi, int64_t* indices) const;

  // The codewords in float64, [segments, k, d].
  const double* codes() const { return codes_.get(); }

  // x with one shared codebook, its segments seen as rows where strides allow it: fuller tiles, the same
  // results.
  StridedRows flatten_segments(const StridedRows& x) const;

  int64_t block_rows(int64_t dim) const { return cpu::block_rows(dim, k_); }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  // Blocks of codewords less the mean, as a kernel packs them; zero where there is none.
  struct Panels {
    std::unique_ptr<Line[]> lines;
    double rest_radius;  // the largest |b - b1| of common/certificate.h
  };
  struct Segment {
    const double*
        targets;  // [k, d]: what canonical() compares with: the codewords, or those of length one for cosine
    std::vector<float> mean;          // [d]
    std::vector<float> half_squares;  // [blocks * block_codes]: infinity where there is no codeword
    double half_square, radius;       // the largest h and |b| of common/certificate.h
    Panels prefilter;
    float unit;  // of its integers
    std::unique_ptr<float[]>
        table;            // [k, table_pitch(d)]: the codewords less the mean, where there is a prefilter
    mutable Panels fine;  // which then may never be needed
    mutable std::once_flag fine_once;
  };

  struct FineTile;
  struct PrefilterTile;

  void assign_segment(const StridedRows& x, int64_t s, int64_t lo, int64_t hi, int64_t* indices,
                      Scratch& scratch) const;
  void prepare(Segment& segment, const Parallel& parallel) const;
  std::vector<float> mean(const Segment& segment, const Parallel& parallel) const;
  template <class PackCode>
  void pack(Panels& panels, int64_t block_bytes, const Parallel& parallel, const PackCode& pack_code) const;
  double centre(const Segment& segment, int64_t k, float* code) const;
  const Panels& fine(const Segment& segment, const Parallel& parallel = on_this_thread) const;
  const Segment& segment(int64_t s) const { return segments_[segments_.size() == 1 ? 0 : s]; }
  int64_t look(PrefilterTile& tile, const StridedRows& x, int64_t s, int64_t start, int64_t end,
               int64_t* indices, std::vector<int64_t>& uncertain) const;
  int64_t choose(PrefilterTile& tile, const StridedRows& x, int64_t s, int64_t n, const RowSize& size,
                 int* codes, int count) const;
  void certify(FineTile& tile, const StridedRows& x, int64_t s, int64_t start, int64_t end, int64_t* indices,
               std::vector<int64_t>& uncertain) const;
  void rescore(FineTile& tile, const StridedRows& x, int64_t s, std::vector<int64_t>& rows,
               int64_t* indices) const;
  double prefilter_error(const Segment& segment, const RowSize& row) const;
  double error_bound(const Segment& segment, const RowSize& row) const;
  double canonical(const double* row, const double* target) const;

  Metric metric_;
  bool exact_;
  int64_t k_, d_;
  Plan plan_;
  int64_t blocks_;
  std::unique_ptr<double[]> codes_, units_;  // [segments, k, d]; those of length one for cosine alone
  std::vector<Segment> segments_;
};

class Search::Scratch {
 public:
  explicit Scratch(const Search& search);
  ~Scratch();

  // False once a row was not finite, or so large that its square is not.
  bool finite() const { return finite_; }

 private:
  friend class Search;
  FineTile& fine();
  PrefilterTile& prefilter();

  const Search& search_;
  std::unique_ptr<FineTile> fine_;
  std::unique_ptr<PrefilterTile> prefilter_;
  std::vector<int64_t> uncertain_;
  bool finite_ = true;
};

}  // namespace uefl::cpu
