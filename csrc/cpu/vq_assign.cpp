#include "cpu/vq_assign.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "common/certificate.h"
#include "cpu/features.h"
#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
namespace {

// codes / |codes| with the norm summed in order; a zero codeword (or one whose norm underflows) stays zero.
std::vector<double> unit_codes(const std::vector<double>& codes, int64_t d) {
  std::vector<double> units(codes.size());
  for (size_t start = 0; start < codes.size(); start += d) {
    double square = 0;
    for (int64_t j = 0; j < d; ++j) square += codes[start + j] * codes[start + j];
    const double norm = std::sqrt(square);
    for (int64_t j = 0; j < d; ++j) units[start + j] = norm > 0 ? codes[start + j] / norm : 0;
  }
  return units;
}

// Measured (benchmarks/NOTES.md). AMX pads elements and codewords to 32, and turning rows into columns costs as much as a few codewords.
[[maybe_unused]] bool amx_pays(int64_t d, int64_t k) { return d >= 8 && k >= 32 && d * k >= 1 << 11; }

constexpr int64_t kRescored = 32;  // rows that are scored again together

// A NaN (of a row, or from a mean that overflowed) must survive all later values: the bound is then infinite.
void raise(double& largest, double value) {
  if (!std::isnan(largest) && !(value <= largest)) largest = value;
}

// The smallest of `count` scores, a multiple of four, NaN left out.
float least(const float* scores, int64_t count) {
  float lane[4] = {INFINITY, INFINITY, INFINITY, INFINITY};
  for (int64_t k = 0; k < count; k += 4) {
    for (int i = 0; i < 4; ++i) lane[i] = scores[k + i] < lane[i] ? scores[k + i] : lane[i];
  }
  return std::min({lane[0], lane[1], lane[2], lane[3]});
}

}  // namespace

Plan plan([[maybe_unused]] int64_t d, [[maybe_unused]] int64_t k) {
  const Isa best = isa();
#if defined(__x86_64__)
  if (best == Isa::amx && (isa_is_forced() || amx_pays(d, k))) return {best, &vq_assign_amx};
  if (best >= Isa::avx512) return {Isa::avx512, &vq_assign_avx512};
  if (best == Isa::avx2) return {best, &vq_assign_avx2};
#endif
  return {best, &vq_assign_portable};
}

int64_t block_rows(int64_t dim, int64_t k) {
  // About 2^21 multiply-adds, some tens of microseconds, and at most 2^16 elements, which stay in the second-level cache.
  // Whole tiles on every instruction set: 192 is a multiple of 12, 6 and 4. The same for all of them, as the error sum is.
  const int64_t rows = std::min((int64_t{1} << 21) / (dim * k), (int64_t{1} << 16) / dim);
  return std::max<int64_t>(192, rows / 192 * 192);
}

// A tile of rows on its way through a kernel, and what comes out.
struct Search::Tile {
  static constexpr int64_t kMaxRows = 192;

  // Long rows come in smaller tiles, which with some codewords stay in the second-level cache.
  Tile(const VqAssignKernel& kernel, int64_t count, int64_t d)
      : kernel(kernel),
        rows(std::min({count, int64_t{kernel.rows}, std::max<int64_t>(64, (1 << 15) / d / 64 * 64)})),
        d(d),
        y(new Line[kernel.tile_bytes(rows, d) / sizeof(Line)]) {}

  void load(const Rows& x, const int64_t* row, int64_t count, int64_t column, const float* mean) {
    const char* source[kMaxRows];
    for (int64_t r = 0; r < count; ++r) source[r] = element(x, row[r], column);
    kernel.load(source, count, x.dtype, x.dim_stride, d, mean, y.get(), size);
  }

  const VqAssignKernel& kernel;
  const int64_t rows, d;
  const std::unique_ptr<Line[]> y;
  RowSize size[kMaxRows];
  float best[kMaxRows], second[kMaxRows];
  int64_t index[kMaxRows];
};

Search::Search(const Codebook& codebook, Metric metric, bool exact, const std::string& op)
    : metric_(metric),
      exact_(exact),
      k_(codebook.k),
      d_(codebook.d),
      plan_(plan(d_, k_)),
      blocks_((k_ + plan_.kernel->lanes - 1) / plan_.kernel->lanes),
      codes_(codebook.segments * k_ * d_) {
  with_type(codebook.dtype, [&]<class T>(const T*) {
    const T* data = static_cast<const T*>(codebook.data);
    for (size_t i = 0; i < codes_.size(); ++i) codes_[i] = static_cast<double>(widen(data[i]));
  });
  if (!std::all_of(codes_.begin(), codes_.end(), [](double value) { return std::isfinite(value); })) {
    throw std::runtime_error(op + ": the codebook holds NaN or infinity; re-initialise those codewords (or lower the learning rate)");
  }
  if (metric == Metric::cosine) units_ = unit_codes(codes_, d_);
  segments_.resize(codebook.segments);
  for (int64_t s = 0; s < codebook.segments; ++s) {
    segments_[s].targets = (metric == Metric::cosine ? units_.data() : codes_.data()) + s * k_ * d_;
    pack(segments_[s]);
  }
}

void Search::pack(Segment& segment) const {
  const VqAssignKernel& kernel = *plan_.kernel;
  const int64_t lanes = kernel.lanes, lines = kernel.block_bytes(d_) / static_cast<int64_t>(sizeof(Line));
  segment.mean.assign(d_, 0.0f);
  if (metric_ == Metric::l2) {
    std::vector<double> sum(d_);
    for (int64_t i = 0; i < k_ * d_; i += d_) {
      for (int64_t j = 0; j < d_; ++j) sum[j] += segment.targets[i + j];
    }
    for (int64_t j = 0; j < d_; ++j) segment.mean[j] = static_cast<float>(sum[j] / static_cast<double>(k_));
  }
  segment.panels.assign(blocks_ * lines, Line{});
  segment.half_squares.assign(blocks_ * lanes, std::numeric_limits<float>::infinity());
  segment.half_square = segment.radius = segment.rest_radius = 0;
  std::vector<float> code(d_);
  for (int64_t k = 0; k < k_; ++k) {
    double square = 0;
    for (int64_t j = 0; j < d_; ++j) {
      const double value = segment.targets[k * d_ + j] - segment.mean[j];
      code[j] = static_cast<float>(value);
      square += value * value;
    }
    const double half_square = metric_ == Metric::l2 ? square / 2 : 0;
    const double rest = kernel.pack(code.data(), d_, k % lanes, &segment.panels[k / lanes * lines]);
    segment.half_squares[k] = static_cast<float>(half_square);
    raise(segment.half_square, half_square);
    raise(segment.radius, std::sqrt(square));
    raise(segment.rest_radius, std::sqrt(rest));
  }
}

double Search::error_bound(const Segment& segment, const RowSize& row) const {
  const bool euclidean = metric_ == Metric::l2;
  if (plan_.kernel->arithmetic == Arithmetic::f32) return score_error(d_, segment.half_square, segment.radius, row.square, euclidean);
  return score_error_bf16x3(d_, segment.half_square, segment.radius, segment.rest_radius, row.square, row.rest, euclidean);
}

void Search::assign(const Rows& x, int64_t lo, int64_t hi, int64_t* indices) const {
  for (int64_t s = 0; s < x.dim / d_; ++s) {
    Tile tile(*plan_.kernel, std::max(hi - lo, kRescored), d_);
    std::vector<int64_t> uncertain;
    for (int64_t start = lo; start < hi; start += tile.rows) {
      certify(tile, x, s, start, std::min(start + tile.rows, hi), indices, uncertain);
      if (static_cast<int64_t>(uncertain.size()) >= kRescored) rescore(tile, x, s, uncertain, indices);
    }
    rescore(tile, x, s, uncertain, indices);
  }
}

// Steps 1 and 2 for rows [start, end), of which those whose winner is not certain go to `uncertain`.
void Search::certify(Tile& tile, const Rows& x, int64_t s, int64_t start, int64_t end, int64_t* indices,
                     std::vector<int64_t>& uncertain) const {
  const int64_t segments = x.dim / d_, count = end - start;
  const Segment& segment = this->segment(s);
  int64_t rows[Tile::kMaxRows];
  std::iota(rows, rows + count, start);
  tile.load(x, rows, count, s * d_, segment.mean.data());
  const bool in_one_piece = x.inner == 1 && x.dim_stride == 1 && x.outer_stride == d_;
  const int64_t next = in_one_piece ? std::min(end + tile.rows, x.outer * x.inner) : end;  // the likely end of the next tile
  const Ahead ahead{element(x, end, s * d_), element(x, next, s * d_)};
  tile.kernel.top_two(tile.y.get(), count, segment.panels.data(), segment.half_squares.data(), blocks_, d_, ahead, tile.best, tile.second,
                      tile.index);
  // The bound of the largest row, which mostly suffices for all, saves two square roots for each.
  RowSize largest{0, 0};
  for (int64_t r = 0; r < count; ++r) {
    raise(largest.square, tile.size[r].square);
    raise(largest.rest, tile.size[r].rest);
  }
  const double bound = exact_ ? error_bound(segment, largest) : 0;
  for (int64_t r = 0; r < count; ++r) {
    indices[rows[r] * segments + s] = std::isnan(tile.size[r].square) ? 0 : tile.index[r];  // a NaN may round to a number in bfloat16
    const double gap = static_cast<double>(tile.second[r]) - tile.best[r];
    if (exact_ && !(gap > 2 * bound) && !(gap > 2 * error_bound(segment, tile.size[r]))) uncertain.push_back(rows[r]);
  }
}

// Step 3.
void Search::rescore(Tile& tile, const Rows& x, int64_t s, std::vector<int64_t>& rows, int64_t* indices) const {
  const VqAssignKernel& kernel = tile.kernel;
  const int64_t segments = x.dim / d_, padded = blocks_ * kernel.lanes, total = static_cast<int64_t>(rows.size());
  const int64_t together = std::min<int64_t>(kernel.rows, kRescored);
  if (total == 0) return;
  const Segment& segment = this->segment(s);
  std::vector<float> scores(together * padded);
  std::vector<double> values(d_);
  for (int64_t start = 0; start < total; start += together) {
    const int64_t count = std::min(together, total - start);
    tile.load(x, &rows[start], count, s * d_, segment.mean.data());
    kernel.scores(tile.y.get(), count, segment.panels.data(), segment.half_squares.data(), blocks_, d_, scores.data());
    for (int64_t r = 0; r < count; ++r) {
      const int64_t n = rows[start + r];
      const float* score = &scores[r * padded];
      const char* source = element(x, n, s * d_);
      with_type(x.dtype, [&]<class T>(const T*) {
        for (int64_t j = 0; j < d_; ++j) values[j] = static_cast<double>(widen(reinterpret_cast<const T*>(source)[j * x.dim_stride]));
      });
      // NaN or infinity, here or in a score, leaves no codeword out: hence the negated comparison.
      const double limit = least(score, padded) + 2 * error_bound(segment, tile.size[r]);
      double best = std::numeric_limits<double>::infinity();
      int64_t index = 0;
      for (int64_t k = 0; k < k_; ++k) {
        if (score[k] > limit) continue;
        const double value = canonical(values.data(), segment.targets + k * d_);
        if (value < best) best = value, index = k;
      }
      indices[n * segments + s] = index;
    }
  }
  rows.clear();
}

// The definition. This file is compiled without contraction: a fused multiply-add would round differently.
double Search::canonical(const double* row, const double* target) const {
  double total = 0;
  if (metric_ == Metric::l2) {
    for (int64_t j = 0; j < d_; ++j) {
      const double difference = row[j] - target[j];
      total += difference * difference;
    }
  } else {
    for (int64_t j = 0; j < d_; ++j) total -= row[j] * target[j];
  }
  return total;
}

Rows Search::flatten_segments(const Rows& x) const {
  const int64_t segments = x.dim / d_;
  if (segments_.size() != 1 || segments == 1 || (x.inner != 1 && x.outer != 1)) return x;
  const int64_t sizes[3] = {x.outer * x.inner, segments, d_};
  const int64_t strides[3] = {x.inner == 1 ? x.outer_stride : x.inner_stride, d_ * x.dim_stride, x.dim_stride};
  Rows rows;
  view_rows(x.data, x.dtype, sizes, strides, 3, rows);  // two leading dimensions always fit
  return rows;
}

}  // namespace uefl::cpu
