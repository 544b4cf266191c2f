// The search for few rows. It scores all codewords in float32, and evaluates the definition for the codewords
// within the bound.
#include "cpu/vq_assign_few.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/vq_assign.h"

namespace uefl::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kFew = 96;               // largest number of rows (docs/design/search-cpu.md)
constexpr float kLargestScore = 0x1p120f;  // sums and bounds of smaller scores do not overflow
constexpr int64_t kOneThread = 1 << 20;    // products that a second thread does not speed up
// If on average one codeword of this number may be the nearest one of a row, because the rows lie far from
// the origin for their distances, differences take less time than the definition for these codewords.
constexpr int64_t kLoose = 16;

double square_of(const float* row, int64_t step, int64_t d) {
  constexpr int64_t kSums = 4;  // sums that hide the latency of an addition
  double sum[kSums] = {};
  for (int64_t j = 0; j < d; ++j) sum[j % kSums] += static_cast<double>(row[j * step]) * row[j * step];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Returns the limit in float32, rounded up, or infinity for NaN.
float rounded_up(double limit) {
  return std::isnan(limit) ? kInfinity : std::nextafter(static_cast<float>(limit), kInfinity);
}

// Finds the codewords whose score for a row is at most the limit. A score of NaN excludes none.
void find(const FewRun& run, int64_t row, float limit, std::vector<int64_t>& found) {
  found.clear();
  for (int64_t k = 0; k < run.k; ++k) {
    if (!(run.scores[k * run.layout.score_pitch + row] > limit)) found.push_back(k);
  }
}

}  // namespace

bool Search::few(const StridedRows& x, const Codebooks& codebooks) {
  const int64_t rows = x.outer * x.inner * (x.dim / codebooks.d);
  const int64_t most = std::min(kFew, 4 * codebooks.k);  // a few codewords are packed at once
  return rows > 0 && rows <= most && x.dtype != Dtype::f64 && codebooks.dtype != Dtype::f64 &&
         codebooks.d <= kLongest && !plan(codebooks.d, codebooks.k).direct && !on_every_shape();
}

// Returns the largest score that the nearest codeword of a row with this square can have, or infinity if
// scores may have overflowed.
double Search::few_limit(FewForm form, float least, double square) const {
  const double d = static_cast<double>(d_), unit = (d + 8) * 0x1p-23, underflow = d * 0x1p-118;
  if (!exact_) return least;
  if (!(std::abs(least) < kLargestScore) || unit > 0.1) return std::numeric_limits<double>::infinity();
  if (form == FewForm::differences) return least * (1 + 3 * unit) + underflow;
  const double row = std::sqrt(square) * (1 + unit);
  if (form == FewForm::cosine) return least + 2.1 * unit * row + d * 0x1p-68;
  // A codeword of length c scores at least c^2 / 2 - row c. This bounds the lengths of the codeword with the
  // least score and then of the nearest codeword, and so the errors of both scores.
  const auto length = [&](double score, double error) {
    const double slope = row * (1 + error) + underflow;
    return (slope + std::sqrt(std::max(0.0, slope * slope + 2 * (1 - error) * score))) / (1 - error);
  };
  const auto error = [&](double c) { return unit * (row + c / 2) * c + underflow * (1 + row + c); };
  const double highest = least + error(length(least + underflow * (1 + row), unit));
  return highest + error(length(highest, 0));
}

// Writes a codeword in float64.
void Search::widen_codeword(int64_t code, double* codeword) const {
  with_type(codebooks_.dtype, [&]<class T>(const T*) {
    const T* given = static_cast<const T*>(codebooks_.data) + code * d_;
    for (int64_t j = 0; j < d_; ++j) codeword[j] = static_cast<double>(widen(given[j]));
  });
}

void Search::check_codeword(const double* code) const {
  bool valid = true;
  for (int64_t j = 0; j < d_; ++j) valid &= std::abs(code[j]) <= kLargest;
  require(valid, op_);
}

// Returns the nearest of some codewords by the definition. `codeword` is workspace for one codeword.
int64_t Search::nearest(const std::vector<int64_t>& candidates, const double* row, double* codeword) const {
  double best = std::numeric_limits<double>::infinity();
  int64_t index = candidates.front();
  std::vector<double> unit(metric_ == Metric::cosine ? d_ : 0);
  for (const int64_t code : candidates) {
    widen_codeword(code, codeword);
    check_codeword(codeword);
    if (metric_ == Metric::cosine) to_unit(codeword, d_, unit.data());
    const double value = canonical(row, metric_ == Metric::cosine ? unit.data() : codeword);
    if (value < best) best = value, index = code;
  }
  return index;
}

// Writes rows [lo, lo + count) of segment s in float32, in the given layout.
void Search::widen_rows(const StridedRows& x, int64_t s, int64_t lo, int64_t count, const FewLayout& layout,
                        float* rows) const {
  const int64_t step = layout.step();
  with_type(x.dtype, [&]<class T>(const T*) {
    for (int64_t r = 0; r < count; ++r) {
      const T* const source = reinterpret_cast<const T*>(element(x, lo + r, s * d_));
      float* const target = rows + layout.start(r);
      for (int64_t j = 0; j < d_; ++j) target[j * step] = static_cast<float>(widen(source[j]));
    }
  });
}

// Scores the codewords and finds for each row those that can be the nearest. Returns their number for all
// rows.
int64_t Search::choose_few(FewRun& run, FewForm form, float* limits, int64_t* chosen,
                           Scratch& scratch) const {
  const VqAssignFewKernel& kernel = few_kernel();
  run.form = form;
  const auto score = [&](int64_t from, int64_t to) { kernel.score(run, from, to); };
  run.count * k_ * d_ < kOneThread ? score(0, k_) : parallel_(k_, score);
  kernel.least(run, limits);
  std::vector<float> squares(run.layout.grouped ? run.layout.score_pitch : run.count, kInfinity);
  if (run.layout.grouped && form != FewForm::differences) kernel.squares(run, squares.data());
  for (int64_t r = 0; r < run.count; ++r) {
    // A small distance comes from a finite row, whose square is then not needed.
    double square = form == FewForm::differences && limits[r] < kLargestScore ? 0 : squares[r];
    if (!(square < kLargestScore)) square = square_of(run.rows + run.layout.start(r), run.layout.step(), d_);
    scratch.finite_ = scratch.finite_ && std::isfinite(square);
    limits[r] = rounded_up(few_limit(form, limits[r], square));
  }
  return kernel.pick(run, limits, chosen);
}

void Search::assign_few(const StridedRows& x, int64_t s, int64_t lo, int64_t hi, int64_t* indices,
                        Scratch& scratch) const {
  const int64_t segments = x.dim / d_, count = hi - lo;
  const int64_t first = prepared_.size() == 1 ? 0 : s * k_;  // first codeword of the codebook
  const FewLayout layout(few_kernel().lanes, count, d_);
  std::vector<float> rows(layout.size(count)), scores(layout.scores(k_), kInfinity), limits(count);
  widen_rows(x, s, lo, count, layout, rows.data());
  FewRun run{
      .layout = layout,
      .rows = rows.data(),
      .count = count,
      .codewords = static_cast<const char*>(codebooks_.data) + first * d_ * element_size(codebooks_.dtype),
      .dtype = codebooks_.dtype,
      .k = k_,
      .d = d_,
      .form = FewForm::cosine,
      .scores = scores.data()};
  std::vector<int64_t> chosen(count), possible;
  const auto choose = [&](FewForm form) {
    return choose_few(run, form, limits.data(), chosen.data(), scratch);
  };
  if (metric_ == Metric::cosine) {
    choose(FewForm::cosine);
  } else if (!layout.grouped || choose(FewForm::products) > count + count * k_ / kLoose) {
    choose(FewForm::differences);
  }
  std::vector<double> row(d_), codeword(d_);
  for (int64_t r = 0; r < count; ++r) {
    int64_t index = first + chosen[r];
    if (chosen[r] < 0) {
      find(run, r, limits[r], possible);
      for (int64_t& code : possible) code += first;
      for (int64_t j = 0; j < d_; ++j) row[j] = rows[layout.start(r) + j * layout.step()];
      index = nearest(possible, row.data(), codeword.data());
    }
    double* const code = &codewords_[index * d_];
    widen_codeword(index, code);
    // A small score comes from a finite codeword.
    if (!(std::abs(scores[(index - first) * layout.score_pitch + r]) < kLargestScore)) check_codeword(code);
    indices[(lo + r) * segments + s] = index - first;
  }
}

}  // namespace uefl::cpu
