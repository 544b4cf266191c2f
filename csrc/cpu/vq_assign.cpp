#include "cpu/vq_assign.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/certificate.h"
#include "cpu/features.h"
#include "cpu/row_buffer.h"
#include "cpu/vq_assign_few.h"
#include "cpu/vq_prefilter.h"

namespace uefl::cpu {
namespace {

// Returns true if AMX is faster, as measured (docs/design/search-cpu.md). AMX pads elements and codewords to
// 32, and transposing rows costs as much as a few codewords.
[[maybe_unused]] bool amx_pays(int64_t d, int64_t k) { return d >= 8 && k >= 32 && d * k >= 1 << 11; }

// Returns true if a half-precision phase saves time. It does so on long codewords only, because its
// candidates are scored again.
[[maybe_unused]] bool one_product_pays(int64_t d, int64_t k) { return d >= 256 && k >= 128; }
[[maybe_unused]] bool integers_pay(Isa isa, int64_t d, int64_t k) {
  if (isa == Isa::portable) return d >= 16 && d * k >= 1 << 11;
  if (isa == Isa::avx2 && splits_vectors()) return d * k >= 1 << 17;
  return d >= (k < 512 ? 64 : 32) && k >= (isa == Isa::avx2 ? 64 : 32);
}

// Returns true if the definition for every codeword costs less than a phase of scores, which takes blocks of
// codewords.
bool direct_pays(int64_t d, int64_t k) { return k <= 4 || d * k <= 32; }
constexpr int64_t kDirectCodewords =
    16;  // largest number of codewords for which the definition costs less than scores and candidates

constexpr int64_t kSmallK = 64;        // codewords whose scores with 16 rows fit into the tile registers
constexpr int64_t kSkippedTiles = 16;  // tiles that skip the prefilter after a tile in which it helped little

// Raises `largest`. A NaN, from a row or from a mean that overflowed, must survive all later values. The
// bound is then infinite.
void raise(double& largest, double value) {
  if (!std::isnan(largest) && !(value <= largest)) largest = value;
}

// Returns the rows of a tile. Tiles of long rows are smaller, so that they and some codewords stay in the
// second-level cache.
int64_t tile_rows(int64_t at_most, int64_t d) {
  return std::min(at_most, std::max<int64_t>(64, (1 << 15) / d / 64 * 64));
}

// Converts elements [column, column + d) of row n to float64.
void widen_row(const StridedRows& x, int64_t n, int64_t column, std::vector<double>& values) {
  const char* source = element(x, n, column);
  with_type(x.dtype, [&]<class T>(const T*) {
    for (size_t j = 0; j < values.size(); ++j)
      values[j] = static_cast<double>(widen(reinterpret_cast<const T*>(source)[j * x.dim_stride]));
  });
}

// Returns the rows after `end`, up to row `next`, if rows are contiguous.
Ahead ahead_of(const StridedRows& x, int64_t end, int64_t next, int64_t column, int64_t d) {
  const bool in_one_piece = x.inner == 1 && x.dim_stride == 1 && x.outer_stride == d;
  return {element(x, end, column), element(x, in_one_piece ? std::min(end + next, x.outer) : end, column)};
}

SearchPlan plan_of_scores([[maybe_unused]] int64_t d, [[maybe_unused]] int64_t k) {
  const Isa best = isa();
#if defined(__x86_64__)
  const bool always = on_every_shape();
  if (best == Isa::amx && (always || amx_pays(d, k))) {
    if (k <= kSmallK) return {best, &vq_assign_small_k_amx, nullptr};
    return {best, &vq_assign_amx, always || one_product_pays(d, k) ? &vq_prefilter_amx : nullptr};
  }
  if (best >= Isa::avx512vnni && (always || integers_pay(best, d, k)))
    return {Isa::avx512vnni, &vq_assign_avx512, &vq_prefilter_avx512vnni};
  if (best >= Isa::avx512) return {Isa::avx512, &vq_assign_avx512, nullptr};
  const PrefilterKernel* const prefilter = best == Isa::avx2 ? &vq_prefilter_avx2 : &vq_prefilter_portable;
  const bool integers = always || integers_pay(best, d, k);
  return {best, best == Isa::avx2 ? &vq_assign_avx2 : &vq_assign_portable, integers ? prefilter : nullptr};
#else
  return {best, &vq_assign_portable, nullptr};
#endif
}

}  // namespace

SearchPlan plan(int64_t d, int64_t k) {
  SearchPlan found = plan_of_scores(d, k);
  // The bounds of longer codewords are infinite (common/certificate.h).
  found.direct = !on_every_shape() && (direct_pays(d, k) || d > kLongest);
  if (found.direct) found.prefilter = nullptr;
  return found;
}

void check_blocks(const SearchPlan& plan) {
  if (!plan.prefilter || plan.prefilter->block_codewords == plan.kernel->block_codewords) return;
  throw std::logic_error("both phases of a search must take blocks of the same number of codewords, got " +
                         std::to_string(plan.prefilter->block_codewords) + " in the first phase and " +
                         std::to_string(plan.kernel->block_codewords) + " in the second (" + name(plan.isa) +
                         ")");
}

int64_t block_rows(int64_t dim, int64_t k) {
  // A block has about 2^21 multiply-adds, some tens of microseconds, and at most 2^16 elements, which stay in
  // the second-level cache. 192 is a multiple of 12, 6 and 4. So blocks are whole tiles on every instruction
  // set, and equal on all of them, as the error sum requires.
  const int64_t rows = std::min((int64_t{1} << 21) / (dim * k), (int64_t{1} << 16) / dim);
  return std::max<int64_t>(192, rows / 192 * 192);
}

// A tile of rows in a kernel, and its results.
struct Search::FineTile {
  static constexpr int64_t kMaxRows = 192;

  FineTile(const VqAssignKernel& kernel, int64_t d)
      : kernel(kernel),
        rows(kernel.load_top_two ? kernel.rows : tile_rows(kernel.rows, d)),
        d(d),
        y(new CacheLine[kernel.tile_bytes(rows, d) / sizeof(CacheLine)]) {}

  void load(const StridedRows& x, const int64_t* row, int64_t count, int64_t column, const float* mean) {
    const char* source[kMaxRows];
    for (int64_t r = 0; r < count; ++r) source[r] = element(x, row[r], column);
    kernel.load(source, count, x.dtype, d, mean, y.get(), size);
  }

  void top_two(const StridedRows& x, int64_t start, int64_t count, int64_t column, const float* mean,
               const void* panels, const float* half_squares, int64_t blocks) {
    const char* source[kMaxRows];
    for (int64_t r = 0; r < count; ++r) source[r] = element(x, start + r, column);
    if (kernel.load_top_two) {
      kernel.load_top_two(source, count, x.dtype, d, mean, y.get(), size, panels, half_squares, blocks, best,
                          second, index);
      return;
    }
    kernel.load(source, count, x.dtype, d, mean, y.get(), size);
    kernel.top_two(y.get(), count, panels, half_squares, blocks, d,
                   ahead_of(x, start + count, rows, column, d), best, second, index);
  }

  const VqAssignKernel& kernel;
  const int64_t rows, d;
  const std::unique_ptr<CacheLine[]> y;
  RowSize size[kMaxRows];
  float best[kMaxRows], second[kMaxRows];
  int64_t index[kMaxRows];
  std::vector<float> scores;  // of rows that are scored again
};

// A tile of rows in the prefilter, and its results.
struct Search::PrefilterTile {
  PrefilterTile(const PrefilterKernel& kernel, int64_t d)
      : kernel(kernel),
        rows(tile_rows(kernel.rows, d)),
        y(new CacheLine[kernel.tile_bytes(rows, d) / sizeof(CacheLine)]),
        scratch(new CacheLine[kernel.scratch_bytes / sizeof(CacheLine)]),
        row(new float[centered_pitch(d)]),
        values(d) {}

  const PrefilterKernel& kernel;
  const int64_t rows;
  const std::unique_ptr<CacheLine[]> y, scratch;
  const std::unique_ptr<float[]> row;
  std::vector<double> values;  // of a row
  RowSize size[CandidateLists::kRows];
  CandidateLists found;
};

double Search::error_bound(const PreparedCodebook& codebook, const RowSize& row) const {
  const bool euclidean = metric_ == Metric::l2;
  if (plan_.kernel->arithmetic == Arithmetic::f32)
    return score_error(d_, codebook.half_square, codebook.radius, row.square, euclidean);
  return score_error_bf16x3(d_, codebook.half_square, codebook.radius, codebook.fine.rest_radius, row.square,
                            row.rest, euclidean);
}

double Search::prefilter_error(const PreparedCodebook& codebook, const RowSize& row) const {
  const auto bound = plan_.prefilter->arithmetic == Arithmetic::bf16 ? score_error_bf16 : score_error_i16;
  return bound(d_, codebook.half_square, codebook.radius, codebook.prefilter.rest_radius, row.square,
               row.rest, metric_ == Metric::l2);
}

Search::Scratch::Scratch(const Search& search) : search_(search) {}
Search::Scratch::~Scratch() = default;

Search::FineTile& Search::Scratch::fine() {
  if (!fine_) fine_ = std::make_unique<FineTile>(*search_.plan_.kernel, search_.d_);
  return *fine_;
}

Search::PrefilterTile& Search::Scratch::prefilter() {
  if (!prefilter_) prefilter_ = std::make_unique<PrefilterTile>(*search_.plan_.prefilter, search_.d_);
  return *prefilter_;
}

void Search::assign(const StridedRows& x, int64_t lo, int64_t hi, int64_t* indices) const {
  Scratch scratch(*this);
  assign(x, lo, hi, indices, scratch);
}

void Search::assign(const StridedRows& x, int64_t lo, int64_t hi, int64_t* indices, Scratch& scratch) const {
  const int64_t segments = x.dim / d_;
  if (x.dim_stride != 1 && x.dim > 1) {  // copy the row so that its elements are contiguous
    RowBuffer together(x);
    for (int64_t first = lo; first < hi; first += block_rows(x.dim)) {
      const int64_t last = std::min(first + block_rows(x.dim), hi);
      const BufferedRows span = together.read(first, last);
      assign(span.rows, span.first, span.first + last - first, indices + (first - span.first) * segments,
             scratch);
    }
    return;
  }
  for (int64_t s = 0; s < segments; ++s) assign_segment(x, s, lo, hi, indices, scratch);
}

void Search::assign_segment(const StridedRows& x, int64_t s, int64_t lo, int64_t hi, int64_t* indices,
                            Scratch& scratch) const {
  if (few_) return assign_few(x, s, lo, hi, indices, scratch);
  if (plan_.direct) return assign_direct(x, s, nullptr, lo, hi - lo, indices, scratch);
  std::vector<int64_t>& uncertain = scratch.uncertain_;
  const auto see = [&](const RowSize* size, int64_t count) {
    for (int64_t r = 0; r < count; ++r) scratch.finite_ = scratch.finite_ && std::isfinite(size[r].square);
  };
  int64_t skipping = 0;  // rows that skip the prefilter because it helped little before
  for (int64_t start = lo, end; start < hi; start = end) {
    if (plan_.prefilter && skipping <= 0) {
      PrefilterTile& tile = scratch.prefilter();
      end = std::min(start + tile.rows, hi);
      const int64_t in_vain = prefilter_tile(tile, x, s, start, end, indices, uncertain);
      see(tile.size, end - start);
      // Skip only if both ways give the same result, which must not depend on earlier rows.
      if (exact_ && 2 * in_vain > end - start) skipping = kSkippedTiles * tile.rows;
    } else {
      end = std::min(start + scratch.fine().rows, hi);
      certify(scratch.fine(), x, s, start, end, indices, uncertain);
      see(scratch.fine().size, end - start);
      skipping -= end - start;
    }
    if (static_cast<int64_t>(uncertain.size()) >= kRescored) rescore(x, s, indices, scratch);
  }
  if (!uncertain.empty()) rescore(x, s, indices, scratch);
}

// Runs the prefilter on rows [start, end). Rows with many codewords within the bound go to `uncertain`.
// Returns the number of these rows.
int64_t Search::prefilter_tile(PrefilterTile& tile, const StridedRows& x, int64_t s, int64_t start,
                               int64_t end, int64_t* indices, std::vector<int64_t>& uncertain) const {
  const int64_t segments = x.dim / d_, count = end - start, before = uncertain.size();
  const PreparedCodebook& codebook = prepared(s);
  CandidateLists& found = tile.found;
  const char* source[CandidateLists::kRows] = {};
  for (int64_t r = 0; r < count; ++r) source[r] = element(x, start + r, s * d_);
  tile.kernel.load(source, count, x.dtype, d_, codebook.mean.data(), tile.y.get(), tile.size);
  for (int64_t r = 0; r < count; ++r) {
    // `slack` bounds the rounding of best + margin and of the margin. |best| is at most about h + |y||b|.
    const double error = prefilter_error(codebook, tile.size[r]);
    const double slack = 0x1p-22 * (codebook.half_square + std::sqrt(tile.size[r].square) * codebook.radius);
    found.margin[r] = error < 0x1p120 ? static_cast<float>(2.01 * error + slack) : NAN;
  }
  tile.kernel.candidates(tile.y.get(), count, codebook.prefilter.lines.get(), codebook.half_squares.data(),
                         blocks_, d_, codebook.unit, ahead_of(x, end, tile.rows, s * d_, d_),
                         tile.scratch.get(), found);
  // Scoring a codeword in float32 costs as much as the fine pass over about sixteen codewords.
  const int most = static_cast<int>(std::clamp<int64_t>(k_ / 16, 4, CandidateLists::kMost));
  for (int64_t r = 0; r < count; ++r) {
    const float limit = found.best[r] + found.margin[r];
    int left = 0;
    if (found.count[r] <= CandidateLists::kMost) {
      for (int i = 0; i < found.count[r]; ++i) {
        if (found.score[r][i] <= limit) found.code[r][left++] = found.code[r][i];
      }
    }
    if (left == 0 || left > most) {
      uncertain.push_back(start + r);
    } else {
      indices[(start + r) * segments + s] =
          left == 1 ? found.code[r][0] : choose(tile, x, s, start + r, tile.size[r], found.code[r], left);
    }
  }
  return static_cast<int64_t>(uncertain.size()) - before;
}

// Returns the nearest of a few codewords, which are given in ascending order.
int64_t Search::choose(PrefilterTile& tile, const StridedRows& x, int64_t s, int64_t n, const RowSize& size,
                       int* candidates, int count) const {
  const PreparedCodebook& codebook = prepared(s);
  float score[CandidateLists::kMost];
  tile.kernel.score_candidates(element(x, n, s * d_), x.dtype, d_, codebook.mean.data(),
                               codebook.centered.get(), codebook.half_squares.data(), candidates, count,
                               tile.row.get(), score);
  const int best = static_cast<int>(std::min_element(score, score + count) - score);
  if (!exact_) return candidates[best];
  const double limit = score[best] + 2 * score_error(d_, codebook.half_square, codebook.radius, size.square,
                                                     metric_ == Metric::l2);
  int left = 0;
  for (int i = 0; i < count; ++i) {
    if (!(score[i] > limit)) candidates[left++] = candidates[i];
  }
  if (left == 1) return candidates[0];
  widen_row(x, n, s * d_, tile.values);
  double least = std::numeric_limits<double>::infinity();
  int64_t index = candidates[0];
  for (int i = 0; i < left; ++i) {
    const double value = canonical(tile.values.data(), codebook.codewords + candidates[i] * d_);
    if (value < least) least = value, index = candidates[i];
  }
  return index;
}

// Runs steps 1 and 2 for rows [start, end). Rows without a certain winner go to `uncertain`.
void Search::certify(FineTile& tile, const StridedRows& x, int64_t s, int64_t start, int64_t end,
                     int64_t* indices, std::vector<int64_t>& uncertain) const {
  const int64_t segments = x.dim / d_, count = end - start;
  const PreparedCodebook& codebook = prepared(s);
  tile.top_two(x, start, count, s * d_, codebook.mean.data(), fine(codebook).lines.get(),
               codebook.half_squares.data(), blocks_);
  // The bound of the largest row is usually enough for all rows. It saves two square roots for each row.
  RowSize largest{0, 0};
  for (int64_t r = 0; r < count; ++r) {
    raise(largest.square, tile.size[r].square);
    raise(largest.rest, tile.size[r].rest);
  }
  const double bound = exact_ ? error_bound(codebook, largest) : 0;
  for (int64_t r = 0; r < count; ++r) {
    indices[(start + r) * segments + s] =
        std::isnan(tile.size[r].square) ? 0 : tile.index[r];  // a NaN may round to a number in bfloat16
    const double gap = static_cast<double>(tile.second[r]) - tile.best[r];
    if (exact_ && !(gap > 2 * bound) && !(gap > 2 * error_bound(codebook, tile.size[r])))
      uncertain.push_back(start + r);
  }
}

// Runs step 3: scores the uncertain rows again.
void Search::rescore(const StridedRows& x, int64_t s, int64_t* indices, Scratch& scratch) const {
  std::vector<int64_t>& rows = scratch.uncertain_;
  if (k_ <= kDirectCodewords && !on_every_shape()) {
    assign_direct(x, s, rows.data(), 0, static_cast<int64_t>(rows.size()), indices, scratch);
    return rows.clear();
  }
  FineTile& tile = scratch.fine();
  const VqAssignKernel& kernel = tile.kernel;
  const int64_t segments = x.dim / d_, padded = blocks_ * kernel.block_codewords,
                total = static_cast<int64_t>(rows.size());
  const int64_t together = std::min<int64_t>(tile.rows, kRescored);
  const PreparedCodebook& codebook = prepared(s);
  tile.scores.resize(together * padded);
  std::vector<double> values(d_);
  for (int64_t start = 0; start < total; start += together) {
    const int64_t count = std::min(together, total - start);
    tile.load(x, &rows[start], count, s * d_, codebook.mean.data());
    kernel.scores(tile.y.get(), count, fine(codebook).lines.get(), codebook.half_squares.data(), blocks_, d_,
                  tile.scores.data());
    for (int64_t r = 0; r < count; ++r) {
      const int64_t n = rows[start + r];
      const float* score = &tile.scores[r * padded];
      widen_row(x, n, s * d_, values);
      // The comparison is negated, so that a NaN or infinity, here or in a score, excludes no codeword.
      const double limit = least_of(score, padded) + 2 * error_bound(codebook, tile.size[r]);
      double best = std::numeric_limits<double>::infinity();
      int64_t index = 0;
      for (int64_t k = 0; k < k_; ++k) {
        if (score[k] > limit) continue;
        const double value = canonical(values.data(), codebook.codewords + k * d_);
        if (value < best) best = value, index = k;
      }
      indices[n * segments + s] = index;
    }
  }
  rows.clear();
}

// Evaluates the definition for every codeword. The rows are the `count` ones from `first` on if `rows` is
// null, otherwise the ones with these numbers.
void Search::assign_direct(const StridedRows& x, int64_t s, const int64_t* rows, int64_t first, int64_t count,
                           int64_t* indices, Scratch& scratch) const {
  const int64_t segments = x.dim / d_;
  scratch.values_.resize(k_ * kDirectGroup);
  const char* source[kDirectRows];
  int64_t found[kDirectRows];
  for (int64_t start = 0; start < count; start += kDirectRows) {
    const int64_t together = std::min(kDirectRows, count - start);
    const auto number = [&](int64_t r) { return rows ? rows[start + r] : first + start + r; };
    for (int64_t r = 0; r < together; ++r) source[r] = element(x, number(r), s * d_);
    const bool finite = direct_kernel().nearest({.rows = source,
                                                 .count = together,
                                                 .dtype = x.dtype,
                                                 .codewords = prepared(s).codewords,
                                                 .k = k_,
                                                 .d = d_,
                                                 .euclidean = metric_ == Metric::l2,
                                                 .values = scratch.values_.data()},
                                                found);
    scratch.finite_ = scratch.finite_ && finite;
    for (int64_t r = 0; r < together; ++r) indices[number(r) * segments + s] = found[r];
  }
}

// Evaluates the definition. This file is compiled without contraction, because a fused multiply-add would
// round differently.
double Search::canonical(const double* row, const double* codeword) const {
  double total = 0;
  if (metric_ == Metric::l2) {
    for (int64_t j = 0; j < d_; ++j) {
      const double difference = row[j] - codeword[j];
      total += difference * difference;
    }
  } else {
    for (int64_t j = 0; j < d_; ++j) total -= row[j] * codeword[j];
  }
  return total;
}

StridedRows Search::flatten_segments(const StridedRows& x) const {
  const int64_t segments = x.dim / d_;
  if (prepared_.size() != 1 || segments == 1 || (x.inner != 1 && x.outer != 1)) return x;
  const int64_t sizes[3] = {x.outer * x.inner, segments, d_};
  const int64_t strides[3] = {x.inner == 1 ? x.outer_stride : x.inner_stride, d_ * x.dim_stride,
                              x.dim_stride};
  StridedRows rows;
  view_rows(x.data, x.dtype, sizes, strides, 3, rows);  // two leading dimensions always fit
  return rows;
}

}  // namespace uefl::cpu
