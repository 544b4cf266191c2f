// The search for few rows: all scores in float32, then the definition for the codewords within the bound.
#include "cpu/vq_assign_few.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/vq_assign.h"

namespace uefl::cpu {
namespace {

// Rows, at most (docs/design/search-cpu.md); of short codewords, which cost little to pack.
constexpr int64_t kFew = 48, kFewShort = 16, kShort = 32;
constexpr int64_t kOneThread = 1 << 20;  // products that a second thread does not speed up

// Finds the codewords with a score of at most the limit. A score or a limit of NaN leaves none out.
void find(const float* scores, int64_t padded, int64_t count, float limit, std::vector<int64_t>& found) {
  found.clear();
  for (int64_t k = 0; k < padded; k += kStep) {
    int any = 0;
    for (int64_t i = 0; i < kStep; ++i) any |= !(scores[k + i] > limit);
    for (int64_t i = k; any && i < std::min(k + kStep, count); ++i) {
      if (!(scores[i] > limit)) found.push_back(i);
    }
  }
}

}  // namespace

bool Search::few(const StridedRows& x, const Codebook& codebook) {
  const int64_t rows = x.outer * x.inner * (x.dim / codebook.d);
  const int64_t most = codebook.d < kShort ? kFewShort : kFew;
  return rows > 0 && rows <= most && codebook.d <= kLongest && x.dtype != Dtype::f64 &&
         codebook.dtype != Dtype::f64 && !on_every_shape();
}

// The score that the nearest codeword of a row of that square may have at most; infinity where scores may
// have overflowed.
double Search::few_limit(float least, double square) const {
  const double d = static_cast<double>(d_), unit = (d + 8) * 0x1p-23;
  if (!exact_) return least;
  if (!(std::abs(least) < 0x1p120f) || unit > 0.1) return std::numeric_limits<double>::infinity();
  return metric_ == Metric::l2 ? least * (1 + 3 * unit) + d * 0x1p-118
                               : least + 2.1 * unit * std::sqrt(square) + d * 0x1p-68;
}

// A codeword in float64, checked.
void Search::widen_code(int64_t code, double* target) const {
  bool valid = true;
  with_type(codebook_.dtype, [&]<class T>(const T*) {
    const T* given = static_cast<const T*>(codebook_.data) + code * d_;
    for (int64_t j = 0; j < d_; ++j) {
      target[j] = static_cast<double>(widen(given[j]));
      valid &= std::abs(target[j]) <= kLargest;
    }
  });
  require(valid, op_);
}

// The nearest of some codewords by the definition; target: room for one.
int64_t Search::nearest(const std::vector<int64_t>& codes, const double* row, double* target) const {
  double best = std::numeric_limits<double>::infinity();
  int64_t index = codes.front();
  std::vector<double> unit(metric_ == Metric::cosine ? d_ : 0);
  for (const int64_t code : codes) {
    widen_code(code, target);
    if (metric_ == Metric::cosine) to_unit(target, d_, unit.data());
    const double value = canonical(row, metric_ == Metric::cosine ? unit.data() : target);
    if (value < best) best = value, index = code;
  }
  return index;
}

void Search::assign_few(const StridedRows& x, int64_t s, int64_t lo, int64_t hi, int64_t* indices,
                        Scratch& scratch) const {
  const VqAssignFewKernel& kernel = few_kernel();
  const int64_t segments = x.dim / d_, count = hi - lo, pitch = kernel.pitch(d_),
                padded = (k_ + kStep - 1) / kStep * kStep;
  const int64_t first = books_.size() == 1 ? 0 : s * k_;  // codeword of the book
  std::vector<float> rows(count * pitch), scores(count * padded, std::numeric_limits<float>::infinity());
  for (int64_t r = 0; r < count; ++r) {
    with_type(x.dtype, [&]<class T>(const T*) {
      const T* source = reinterpret_cast<const T*>(element(x, lo + r, s * d_));
      for (int64_t j = 0; j < d_; ++j) rows[r * pitch + j] = static_cast<float>(widen(source[j]));
    });
  }
  const char* codes = static_cast<const char*>(codebook_.data) + first * d_ * element_size(codebook_.dtype);
  const FewRun run{.rows = rows.data(),
                   .count = count,
                   .pitch = pitch,
                   .codes = codes,
                   .dtype = codebook_.dtype,
                   .k = k_,
                   .d = d_,
                   .euclidean = metric_ == Metric::l2,
                   .scores = scores.data(),
                   .score_pitch = padded};
  const auto score = [&](int64_t from, int64_t to) { kernel.score(run, from, to); };
  count * k_ * d_ < kOneThread ? score(0, k_) : parallel_(k_, score);

  std::vector<double> row(d_), target(d_);
  std::vector<int64_t> possible;
  for (int64_t r = 0; r < count; ++r) {
    double square = 0;
    for (int64_t j = 0; j < d_; ++j) {
      row[j] = rows[r * pitch + j];
      square += row[j] * row[j];
    }
    scratch.finite_ = scratch.finite_ && std::isfinite(square);
    const float least = least_of(&scores[r * padded], padded);
    const float limit = std::nextafter(static_cast<float>(few_limit(least, square)), INFINITY);  // rounded up
    find(&scores[r * padded], padded, k_, limit, possible);
    for (int64_t& code : possible) code += first;
    const int64_t index = possible.size() == 1 ? possible[0] : nearest(possible, row.data(), target.data());
    widen_code(index, &codes_[index * d_]);
    indices[(lo + r) * segments + s] = index - first;
  }
}

}  // namespace uefl::cpu
