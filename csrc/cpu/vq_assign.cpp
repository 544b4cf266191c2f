#include "cpu/vq_assign.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "common/certificate.h"
#include "cpu/features.h"
#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kMaxTileRows = 12;

const VqAssignKernel& kernel() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return vq_assign_avx512;
  if (isa() == Isa::avx2) return vq_assign_avx2;
#endif
  isa();  // a wrong UEFL_CPU is an error on every machine
  return vq_assign_portable;
}

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

// A tile of rows on its way through the kernel.
struct Tile {
  explicit Tile(int64_t d) : y(kernel().rows * ((d + 63) / 64) * 64) {}

  void load(const Rows& x, const int64_t* row, int64_t count, int64_t column, int64_t d, const float* mean) {
    const char* source[kMaxTileRows];
    for (int64_t r = 0; r < kernel().rows; ++r) source[r] = element(x, row[std::min(r, count - 1)], column);
    kernel().load(source, x.dtype, x.dim_stride, d, mean, y.data(), square);
  }

  std::vector<float> y;
  double square[kMaxTileRows];
};

}  // namespace

TileShape tile_shape() { return {kernel().rows, kernel().lanes}; }

int64_t block_rows(int64_t dim, int64_t k) {
  // About 2^21 multiply-adds, some tens of microseconds, and at most 2^16 elements, which stay in the second-level cache.
  // Whole tiles on every instruction set: 48 is a multiple of 12, 6 and 4. The same for all of them, as the error sum is.
  const int64_t rows = std::min((int64_t{1} << 21) / (dim * k), (int64_t{1} << 16) / dim);
  return std::max<int64_t>(48, rows / 48 * 48);
}

Search::Search(const Codebook& codebook, Metric metric, bool exact, const std::string& op)
    : metric_(metric), exact_(exact), k_(codebook.k), d_(codebook.d), codes_(codebook.segments * codebook.k * codebook.d) {
  with_type(codebook.dtype, [&]<class T>(const T*) {
    const T* data = static_cast<const T*>(codebook.data);
    for (size_t i = 0; i < codes_.size(); ++i) codes_[i] = static_cast<double>(widen(data[i]));
  });
  if (!std::all_of(codes_.begin(), codes_.end(), [](double value) { return std::isfinite(value); })) {
    throw std::runtime_error(op + ": the codebook holds NaN or infinity; re-initialise those codewords (or lower the learning rate)");
  }
  if (metric == Metric::cosine) units_ = unit_codes(codes_, d_);
  blocks_ = (k_ + kernel().lanes - 1) / kernel().lanes;
  segments_.resize(codebook.segments);
  for (int64_t s = 0; s < codebook.segments; ++s) {
    segments_[s].targets = (metric == Metric::cosine ? units_.data() : codes_.data()) + s * k_ * d_;
    pack(segments_[s]);
  }
}

void Search::pack(Segment& segment) const {
  const int64_t lanes = kernel().lanes, per_line = sizeof(Line) / sizeof(float);
  const auto lines = [&](int64_t floats) { return std::vector<Line>((floats + per_line - 1) / per_line); };
  segment.mean.assign(d_, 0.0f);
  if (metric_ == Metric::l2) {
    std::vector<double> sum(d_);
    for (int64_t i = 0; i < k_ * d_; i += d_) {
      for (int64_t j = 0; j < d_; ++j) sum[j] += segment.targets[i + j];
    }
    for (int64_t j = 0; j < d_; ++j) segment.mean[j] = static_cast<float>(sum[j] / static_cast<double>(k_));
  }
  segment.panels = lines(blocks_ * d_ * lanes);
  segment.half_squares = lines(blocks_ * lanes);
  segment.half_square = segment.radius = 0;
  float* panels = segment.panels.data()->values;
  float* half_squares = segment.half_squares.data()->values;
  std::fill(half_squares, half_squares + blocks_ * lanes, std::numeric_limits<float>::infinity());
  for (int64_t k = 0; k < k_; ++k) {
    double square = 0;
    for (int64_t j = 0; j < d_; ++j) {
      const double value = segment.targets[k * d_ + j] - segment.mean[j];
      panels[(k / lanes * d_ + j) * lanes + k % lanes] = static_cast<float>(value);
      square += value * value;
    }
    const double half_square = metric_ == Metric::l2 ? square / 2 : 0;
    half_squares[k] = static_cast<float>(half_square);
    // A NaN (from a mean that overflowed) must survive: the bound is then infinite and every row is evaluated by the definition.
    if (!(half_square <= segment.half_square)) segment.half_square = half_square;
    if (!(std::sqrt(square) <= segment.radius)) segment.radius = std::sqrt(square);
  }
}

double Search::error_bound(const Segment& segment, double square) const {
  return score_error(d_, segment.half_square, segment.radius, square, metric_ == Metric::l2);
}

void Search::assign(const Rows& x, int64_t lo, int64_t hi, int64_t* indices) const {
  const int64_t segments = x.dim / d_, tile_rows = kernel().rows;
  Tile tile(d_);
  std::vector<int64_t> flagged;
  float best[kMaxTileRows], second[kMaxTileRows];
  int64_t row[kMaxTileRows], index[kMaxTileRows];
  for (int64_t s = 0; s < segments; ++s) {
    const Segment& segment = segments_[segments_.size() == 1 ? 0 : s];
    flagged.clear();
    for (int64_t start = lo; start < hi; start += tile_rows) {
      const int64_t count = std::min(tile_rows, hi - start);
      for (int64_t r = 0; r < count; ++r) row[r] = start + r;
      tile.load(x, row, count, s * d_, d_, segment.mean.data());
      kernel().top_two(tile.y.data(), segment.panels.data()->values, segment.half_squares.data()->values, blocks_, d_, best, second, index);
      for (int64_t r = 0; r < count; ++r) {
        indices[row[r] * segments + s] = index[r];
        const double gap = static_cast<double>(second[r]) - best[r];
        if (exact_ && !(gap > 2 * error_bound(segment, tile.square[r]))) flagged.push_back(row[r]);
      }
    }
    if (!flagged.empty()) rescore(x, s, segment, flagged, indices);
  }
}

void Search::rescore(const Rows& x, int64_t s, const Segment& segment, const std::vector<int64_t>& flagged, int64_t* indices) const {
  const int64_t segments = x.dim / d_, tile_rows = kernel().rows, padded = blocks_ * kernel().lanes;
  const int64_t total = static_cast<int64_t>(flagged.size());
  Tile tile(d_);
  std::vector<float> scores(tile_rows * padded);
  std::vector<double> values(d_);
  for (int64_t start = 0; start < total; start += tile_rows) {
    const int64_t count = std::min(tile_rows, total - start);
    tile.load(x, &flagged[start], count, s * d_, d_, segment.mean.data());
    kernel().scores(tile.y.data(), segment.panels.data()->values, segment.half_squares.data()->values, blocks_, d_, scores.data());
    for (int64_t r = 0; r < count; ++r) {
      const int64_t n = flagged[start + r];
      const float* score = &scores[r * padded];
      const char* source = element(x, n, s * d_);
      with_type(x.dtype, [&]<class T>(const T*) {
        for (int64_t j = 0; j < d_; ++j) values[j] = static_cast<double>(widen(reinterpret_cast<const T*>(source)[j * x.dim_stride]));
      });
      // NaN or infinity, here or in a score, leaves no codeword out: hence the negated comparison.
      const double limit = *std::min_element(score, score + k_) + 2 * error_bound(segment, tile.square[r]);
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
