#include "cpu/kmeans_bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/certificate.h"
#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

KMeansBounds::KMeansBounds(const Dense& x, int64_t stride, const KMeansCenters& centers,
                           const Parallel& parallel)
    : x_(x),
      stride_(stride),
      rows_((x.n + stride - 1) / stride),
      k_(centers.count()),
      d_(x.d),
      pitch_((d_ + 63) / 64 * 64),
      width_(width(k_)),
      centers_(k_ * d_),
      mean_(d_),
      centered_(k_ * pitch_),
      ways_(k_),
      way_(width_),
      half_squares_(width_, kInfinity),
      norms_(rows_),
      reach_(new float[rows_ * width_]),
      own_(rows_, kInfinity) {
  centers.widen(centers_.data());
  std::vector<double> sum(d_);
  for (int64_t i = 0; i < k_ * d_; ++i) sum[i % d_] += centers_[i];
  for (int64_t j = 0; j < d_; ++j) mean_[j] = static_cast<float>(sum[j] / static_cast<double>(k_));
  parallel(rows_, [&](int64_t lo, int64_t hi) {
    std::vector<float> y(pitch_);
    for (int64_t row = lo; row < hi; ++row) {
      const double square = square_bound(kernel_.center(x_, row * stride_, mean_.data(), y.data()), d_);
      norms_[row] = static_cast<float>(std::sqrt(square) * (1 + 0x1p-20));
    }
    std::fill(&reach_[lo * width_], &reach_[hi * width_], -kInfinity);
  });
  most_norm_ = *std::max_element(norms_.begin(), norms_.end());
  follow(centers, parallel);
}

void KMeansBounds::follow(const KMeansCenters& centers, const Parallel& parallel) {
  std::vector<double> squares(k_);
  parallel(k_, [&](int64_t lo, int64_t hi) {
    std::vector<double> now(d_);
    for (int64_t k = lo; k < hi; ++k) {
      centers.widen(k, now.data());
      double *before = &centers_[k * d_], moved = 0;
      for (int64_t j = 0; j < d_; ++j) {
        const double b = now[j] - mean_[j], step = now[j] - before[j];
        centered_[k * pitch_ + j] = static_cast<float>(b);
        squares[k] += b * b;
        moved += step * step;
        before[j] = now[j];
      }
      ways_[k] += std::sqrt(moved) * (1 + 0x1p-30);
      way_[k] = static_cast<float>(ways_[k]);
      half_squares_[k] = static_cast<float>(squares[k] / 2);
    }
  });
  const double most = *std::max_element(squares.begin(), squares.end());
  most_square_ = std::max(most_square_, most);
  const double most_way = *std::max_element(ways_.begin(), ways_.end()), half_square = most_square_ / 2,
               radius = std::sqrt(most_square_);
  error_ = 2 * score_error(d_, half_square, radius, most_norm_ * most_norm_, true);
  // reach, the bounds and the limits are rounded to float32, which loses about 5 * 2^-24 of their terms in
  // addition.
  slack_ = error_ + 0x1p-20 * (half_square + most_norm_ * (radius + 2 * most_way));
}

int64_t KMeansBounds::assign(int64_t first, int64_t last, int64_t* labels) {
  std::vector<float> y(pitch_), products(k_), scores(k_);
  std::vector<int32_t> codes(width_);
  int64_t scored = 0;
  for (int64_t row = first; row < last; ++row) {
    const float norm = norms_[row];
    float* const reach = &reach_[row * width_];
    const auto possible = [&](int64_t k, double limit) {
      return kernel_.possible(reach + k, &half_squares_[k], &way_[k], norm, static_cast<float>(limit));
    };
    const auto all_ruled_out = [&](double limit) {
      for (int64_t k = 0; k < width_; k += 64) {
        if (possible(k, limit)) return false;
      }
      return true;
    };
    int32_t label = static_cast<int32_t>(labels[row]);
    // No other center is nearer if its bound exceeds the largest possible score of the row's own center.
    const double upper_bound = double{own_[row]} + half_squares_[label] + double{norm} * way_[label] + slack_;
    if (upper_bound < kInfinity && all_ruled_out(upper_bound)) continue;

    // Score the row's own center, then each center that its bound does not exclude.
    kernel_.center(x_, row * stride_, mean_.data(), y.data());
    float product;
    kernel_.products(y.data(), centered_.data(), pitch_, &label, 1, &product);
    const float score = product + half_squares_[label];
    reach[label] = kInfinity;
    int64_t count = 0;
    if (score + slack_ < kInfinity) {
      for (int64_t k = 0; k < width_; k += 64) {
        for (uint64_t left = possible(k, score + slack_); left; left &= left - 1) {
          codes[count++] = static_cast<int32_t>(k) + __builtin_ctzll(left);
        }
      }
    } else {  // the score overflows, so the bounds rule out no center
      for (int32_t k = 0; k < k_; ++k) {
        if (k != label) codes[count++] = k;
      }
    }
    scored += count + 1;
    if (count > 0) {
      kernel_.products(y.data(), centered_.data(), pitch_, codes.data(), count, products.data());
      for (int64_t i = 0; i < count; ++i) {
        reach[codes[i]] = products[i] + norm * way_[codes[i]];
        scores[i] = products[i] + half_squares_[codes[i]];
      }
      codes[count] = label, products[count] = product, scores[count] = score;
      const int64_t best = nearest(row, codes.data(), scores.data(), count + 1);
      reach[label] = product + norm * way_[label];
      label = codes[best], product = products[best];
      reach[label] = kInfinity;
      labels[row] = label;
    }
    own_[row] = product - norm * way_[label];
  }
  return scored;
}

// Returns the position in `codes` of the nearest of the scored centers. Scores within the error bound of the
// best are compared by their float64 distances, with ties to the lowest index.
int64_t KMeansBounds::nearest(int64_t row, const int32_t* codes, const float* scores, int64_t count) const {
  const int64_t best = std::min_element(scores, scores + count) - scores;
  const double limit = scores[best] + error_;
  if (std::count_if(scores, scores + count, [&](float score) { return !(score > limit); }) == 1) return best;
  double least = std::numeric_limits<double>::infinity();
  int64_t found = best;
  for (int64_t i = 0; i < count; ++i) {
    if (scores[i] > limit) continue;
    double distance = 0;
    const char* x = x_.row(row * stride_);
    for (int64_t j = 0; j < d_; ++j) {
      const double value =
          x_.wide ? reinterpret_cast<const double*>(x)[j] : reinterpret_cast<const float*>(x)[j];
      const double difference = value - centers_[codes[i] * d_ + j];
      distance += difference * difference;
    }
    if (distance < least || (distance == least && codes[i] < codes[found])) least = distance, found = i;
  }
  return found;
}

}  // namespace uefl::cpu
