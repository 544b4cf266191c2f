// vq_assign on the CPU finds the exact index of the nearest codeword of every segment of every row.
//
// The float64 distance defines the result (Search::canonical): terms are rounded and added in the order of
// the elements, ties go to the lowest index, and NaN never wins. For most rows, this distance is not
// computed:
//   1. Score all codewords for a tile of rows in float32 or three bfloat16 products, and keep the best
//      and the second-best score (vq_assign_kernel.h, for each instruction set).
//   2. Accept the best one if the gap exceeds the error bound of common/certificate.h.
//   3. Score the other rows again, and evaluate the few codewords within the bound by the definition.
// If the codewords are few or short, the definition is as fast as a score, so the definition alone decides
// (vq_assign_direct_kernel.h). If x has few rows, they are compared with the unpacked codebook
// (vq_assign_few_kernel.h), because packing would cost more. Step 3 follows for the codewords within the
// bound. Long codewords first pass a prefilter in half the bits (vq_prefilter.h). Rows with many codewords
// within the larger bound of the prefilter go to step 1. For the other rows, each of the few codewords is
// scored in float32, and the definition decides among the ones that are still possible. So the result depends
// only on the row and the codebook. It does not depend on the instruction set, the tile, the batch or the
// number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/cache_line.h"
#include "cpu/features.h"
#include "cpu/strided_rows.h"
#include "cpu/threads.h"

namespace uefl::cpu {

enum class Metric { l2, cosine };

// The largest allowed magnitude of an element of a codebook or of clustered rows. The sum of the squares of
// 2^60 such elements is finite in float64.
constexpr double kLargest = 0x1p480;

// Contiguous codebooks [count, k, d]. If count == 1, one codebook serves all segments of x.
struct Codebooks {
  const void* data;
  Dtype dtype;
  int64_t count, k, d;
};

struct FewLayout;
struct FewRun;
enum class FewForm;
struct PrefilterKernel;
struct VqAssignKernel;
struct RowSize;

// The kernels for k codewords of d elements: the variant in use, or a simpler one if that is faster.
struct SearchPlan {
  Isa isa;
  const VqAssignKernel* kernel;
  const PrefilterKernel* prefilter;  // runs before the kernel, or null
  bool direct = false;               // only the definition decides, for every row
};
SearchPlan plan(int64_t d, int64_t k);
// Throws std::logic_error unless both phases of a plan take blocks of the same number of codewords, since
// they share half_squares.
void check_blocks(const SearchPlan& plan);

// Returns the rows in a block of work. This number depends only on the shape, so results per block do not
// depend on the threads.
int64_t block_rows(int64_t dim, int64_t k);

// A codebook prepared for one call.
class Search {
 public:
  // Copies the codebook, unless `few` is true; then the codebook must outlive the search. exact = false skips
  // steps 2 and 3 and everything in float64. Throws std::runtime_error with the name of the op if the
  // codebook is not finite or exceeds kLargest. A search of few rows throws it from assign().
  Search(const Codebooks& codebooks, Metric metric, bool exact, const std::string& op = "vq_assign",
         const Parallel& parallel = on_this_thread, bool few = false);

  // Returns true if packing the codebook does not pay: x has few rows, short enough for a bound in float32.
  static bool few(const StridedRows& x, const Codebooks& codebooks);

  // The memory for the searches of one thread. Its reuse saves page faults in every call.
  class Scratch;

  // Writes the codewords of rows [lo, hi) of x, with dim = S * d, to indices[n * S + s]. Thread-safe if each
  // thread has its own scratch. Long runs of rows are faster, because uncertain rows are scored again
  // together.
  void assign(const StridedRows& x, int64_t lo, int64_t hi, int64_t* indices, Scratch& scratch) const;
  void assign(const StridedRows& x, int64_t lo, int64_t hi, int64_t* indices) const;

  // Returns the codewords in float64, [codebooks, k, d]. A search of few rows has only the chosen codewords.
  const double* codewords() const { return codewords_.get(); }

  // Views the segments of x as rows if its strides allow that (one shared codebook only). Tiles are then
  // fuller, and the results are the same.
  StridedRows flatten_segments(const StridedRows& x) const;

  int64_t block_rows(int64_t dim) const { return cpu::block_rows(dim, k_); }

 private:
  // Blocks of codewords minus the mean, as a kernel packs them. The padding is zero.
  struct Panels {
    std::unique_ptr<CacheLine[]> lines;
    double rest_radius;  // the largest |b - b1| of common/certificate.h
  };
  // One codebook with the values and the packed codewords that its searches read.
  struct PreparedCodebook {
    const double* codewords;          // [k, d]: the codewords for canonical(), normalized for cosine
    std::vector<float> mean;          // [d]
    std::vector<float> half_squares;  // [blocks * block_codewords]: infinity in the padding
    double half_square, radius;       // the largest h and |b| of common/certificate.h
    Panels prefilter;
    float unit;  // unit of the fixed-point numbers
    std::unique_ptr<float[]>
        centered;         // [k, centered_pitch(d)]: the codewords minus the mean, if there is a prefilter
    mutable Panels fine;  // packed on first use if there is a prefilter
    mutable std::once_flag fine_once;
  };

  struct FineTile;
  struct PrefilterTile;

  static void require(bool valid, const std::string& op);
  void assign_few(const StridedRows& x, int64_t s, int64_t lo, int64_t hi, int64_t* indices,
                  Scratch& scratch) const;
  void assign_direct(const StridedRows& x, int64_t s, const int64_t* rows, int64_t first, int64_t count,
                     int64_t* indices, Scratch& scratch) const;
  void widen_rows(const StridedRows& x, int64_t s, int64_t lo, int64_t count, const FewLayout& layout,
                  float* rows) const;
  int64_t choose_few(FewRun& run, FewForm form, float* limits, int64_t* chosen, Scratch& scratch) const;
  double few_limit(FewForm form, float least, double square) const;
  int64_t nearest(const std::vector<int64_t>& candidates, const double* row, double* codeword) const;
  void widen_codeword(int64_t code, double* codeword) const;
  void check_codeword(const double* code) const;
  void assign_segment(const StridedRows& x, int64_t s, int64_t lo, int64_t hi, int64_t* indices,
                      Scratch& scratch) const;
  void prepare(PreparedCodebook& codebook, const Parallel& parallel) const;
  std::vector<float> mean(const PreparedCodebook& codebook, const Parallel& parallel) const;
  template <class PackCodeword>
  void pack(Panels& panels, int64_t block_bytes, const Parallel& parallel,
            const PackCodeword& pack_codeword) const;
  double center(const PreparedCodebook& codebook, int64_t k, float* code) const;
  const Panels& fine(const PreparedCodebook& codebook, const Parallel& parallel = on_this_thread) const;
  const PreparedCodebook& prepared(int64_t s) const { return prepared_[prepared_.size() == 1 ? 0 : s]; }
  int64_t prefilter_tile(PrefilterTile& tile, const StridedRows& x, int64_t s, int64_t start, int64_t end,
                         int64_t* indices, std::vector<int64_t>& uncertain) const;
  int64_t choose(PrefilterTile& tile, const StridedRows& x, int64_t s, int64_t n, const RowSize& size,
                 int* candidates, int count) const;
  void certify(FineTile& tile, const StridedRows& x, int64_t s, int64_t start, int64_t end, int64_t* indices,
               std::vector<int64_t>& uncertain) const;
  void rescore(const StridedRows& x, int64_t s, int64_t* indices, Scratch& scratch) const;
  double prefilter_error(const PreparedCodebook& codebook, const RowSize& row) const;
  double error_bound(const PreparedCodebook& codebook, const RowSize& row) const;
  double canonical(const double* row, const double* codeword) const;

  const Codebooks codebooks_;
  Metric metric_;
  bool exact_, few_;
  std::string op_;     // for a search of few rows
  Parallel parallel_;  // threads for a search of few rows
  int64_t k_, d_;
  SearchPlan plan_;
  int64_t blocks_;
  // [codebooks, k, d]; units_ are the normalized codewords, for cosine only.
  std::unique_ptr<double[]> codewords_, units_;
  std::vector<PreparedCodebook> prepared_;
};

class Search::Scratch {
 public:
  explicit Scratch(const Search& search);
  ~Scratch();

  // Returns false if a row was not finite, or so large that its square overflows.
  bool finite() const { return finite_; }

 private:
  friend class Search;
  FineTile& fine();
  PrefilterTile& prefilter();

  const Search& search_;
  std::unique_ptr<FineTile> fine_;
  std::unique_ptr<PrefilterTile> prefilter_;
  std::vector<int64_t> uncertain_;
  std::vector<double> values_;  // values of the definition for a group of rows
  bool finite_ = true;
};

}  // namespace uefl::cpu
