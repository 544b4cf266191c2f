// The parts that the searches on tensor cores share: the scale of a row, its scores as integers, the two
// least scores, and the decision whether the least one is certain.
//
// The score of codeword k is |b|^2 / 2 - y.b with one float16 product (common/certificate.h). It is computed
// as base + score. The base is so much larger than all scores that every sum has the exponent of the base. So
// the bits of these sums are equidistant, and order as integers do. After a shift, they leave room for the
// number of the column. The least of three scores is then one operation on integers, and its number comes
// with it. The shift is a multiplication, which runs in another pipe. The four lanes of a row exchange their
// results once, at the end.
#pragma once

#include <climits>
#include <cstring>

#include "cuda/vq_assign_pack.h"

namespace uefl::cuda {
namespace {

template <class T>
__device__ inline Four<float> less_center(const Four<T>& x, const Four<float>& center) {
  Four<float> y;
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) y.values[i] = static_cast<float>(widen(x.values[i]) - center.values[i]);
  return y;
}

// Returns elements j to j + 3 of y = x - mu, for a row that begins at x. j is a multiple of four. Elements
// after the end of the row, or of a null row, are zero.
template <class T>
__device__ inline Four<float> centered_four(const T* x, const Shape& shape, const float* center, int64_t j) {
  if (x == nullptr || j >= shape.d) return {};
  if (shape.stride == 1 && shape.d % 4 == 0 && reinterpret_cast<uintptr_t>(x) % sizeof(Four<T>) == 0) {
    return less_center(load_four(x + j), load_four(center + j));
  }
  Four<float> y{};
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (j + i < shape.d) y.values[i] = static_cast<float>(widen(x[(j + i) * shape.stride]) - center[j + i]);
  }
  return y;
}

__device__ inline float squared(const Four<float>& y, float sum) {
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) sum = fmaf(y.values[i], y.values[i], sum);
  return sum;
}

// Returns four scaled elements in float16, as two registers of a fragment. Adds the squares of the rounding
// errors to `rest`.
__device__ inline uint2 halves_of(const Four<float>& scaled, float& rest) {
  const uint2 halves{to_halves(scaled.values[0], scaled.values[1]),
                     to_halves(scaled.values[2], scaled.values[3])};
  Four<float> lacking;
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = i < 2 ? halves.x : halves.y;
    lacking.values[i] = scaled.values[i] - from_half(static_cast<uint16_t>(pair >> i % 2 * 16));
  }
  rest = squared(lacking, rest);
  return halves;
}

// The power of two that scales all rows of a codebook to lengths below 2^15. float16 rows without a center
// keep their values.
struct RowScale {
  float up, down;  // factors: for rows, and for their products with the packed codewords
  float least;     // the least norm of a row; shorter rows count as if they had it
  float back;      // 1 / up
  bool centered;   // the center is not zero

  RowScale() = default;
  // All lanes of a warp call it.
  __device__ RowScale(const Shape& shape, const PackedCodebook& packed, int64_t codebook, bool halves)
      : centered(false) {
    for (int64_t j = threadIdx.x % kWarp; j - threadIdx.x % kWarp < shape.d; j += kWarp) {
      centered = centered || __any_sync(kAllLanes, j < shape.d && packed.center[codebook * shape.d + j] != 0);
    }
    const int code_exponent = codebook_exponent(packed, codebook),
              row_exponent = exponent_of(longest_row(packed, codebook), -126, 60);
    const int shift = halves && !centered ? 0 : 14 - row_exponent;
    up = power(shift), back = power(-shift), down = power(code_exponent - 14 - shift),
    least = least_norm(code_exponent);
  }
  // Returns the norm of a row, or of its rounding errors, from the square of the scaled numbers, rounded up a
  // little. Squares below 2^-126 may be lost, so a bound for them is added.
  __device__ float rest(float square, int64_t d) const {
    return rough_root(1.01f * square + static_cast<float>(d) * 0x1p-125f) * back;
  }
  // Returns the norm of a row. A row with a NaN has norm infinity.
  __device__ float norm_of(float root, float square) const {
    return isnan(square) ? INFINITY : fmaxf(root, least);
  }
  __device__ float norm(float square, int64_t d) const { return norm_of(rest(square, d), square); }
};

// The error bound of the scores of a codebook: the terms of fp16_error() (common/certificate.h) in float32,
// rounded up a little.
struct Certificate {
  float constant, norm, square, rest;
  float radius;  // G
  float reach;

  Certificate() = default;
  __device__ Certificate(const Shape& shape, const PackedCodebook& packed, int64_t codebook) {
    const double* bounds = packed.bounds + 4 * codebook;
    const int64_t d = opaque(static_cast<int>(shape.d));
    const auto found = [&](int i) { return static_cast<float>(bounds[i]); };
    const float rest_radius = found(2) * power(codebook_exponent(packed, codebook) - 14);
    const auto terms = fp16_error<float>(d, found(0), found(1), rest_radius, shape.euclidean);
    constant = 1.01f * terms.constant, norm = 1.01f * terms.norm, square = 1.01f * terms.square,
    rest = 1.01f * terms.rest;
    radius = 1.01f * (found(1) + rest_radius);
    reach = reach_of(bounds);
  }
  // Returns the largest norm for which the bound holds.
  __device__ float longest() const { return 0.99f * fminf(reach, kLargestProduct / radius); }

  __device__ float error(float row_norm, float row_rest) const {
    return constant + row_norm * (norm + row_norm * square) + rest * row_rest;
  }
};

// Returns a score with the number of its column. A thread has at most 32 columns of a row in a tile.
__device__ inline int pack(float score, int column, int shift) {
  return multiply_add_integer(__float_as_int(score), shift, column);
}

// Returns the least of four scores. They are positive, so they order as integers.
__device__ inline float least_of_four(const float* scores) {
  const auto bits = [&](int i) { return __float_as_int(scores[i]); };
  return __int_as_float(lesser(least(bits(0), bits(1), bits(2)), bits(3)));
}

// The best and the second-best packed score.
struct PackedTopTwo {
  int best = INT_MAX, second = INT_MAX;

  __device__ void add(const PackedTopTwo& other) {
    second = least(second, other.second, greater(best, other.best));
    best = lesser(best, other.best);
  }
};

// Returns the least of the kCount numbers that begin at `first`.
template <int kCount>
__device__ inline int least_of(const int* first) {
  int found = first[0];
  UEFL_UNROLL
  for (int i = 1; i < kCount; i += 2)
    found = i + 1 < kCount ? least(found, first[i], first[i + 1]) : lesser(found, first[i]);
  return found;
}

// The least of each row and of each column, for numbers in a grid of three rows, one after the other. The two
// least numbers are in different rows or in different columns. So the second least is the lesser of two
// numbers: the second of the rows and the second of the columns.
template <int kCount>
struct GridMinima {
  static constexpr int kColumns = (kCount + 2) / 3;
  int rows[3], columns[kColumns];

  __device__ explicit GridMinima(const int (&of)[kCount]) {
    rows[0] = least_of<kColumns>(of), rows[1] = least_of<kColumns>(of + kColumns);
    rows[2] = least_of<kCount - 2 * kColumns>(of + 2 * kColumns);
    UEFL_UNROLL
    for (int i = 0; i < kColumns; ++i)
      columns[i] = i + 2 * kColumns < kCount ? least(of[i], of[i + kColumns], of[i + 2 * kColumns])
                                             : lesser(of[i], of[i + kColumns]);
  }
};

// Returns the second least of at least three numbers, given the least one.
template <int kCount>
__device__ inline int second_of(const int (&of)[kCount], int best) {
  if constexpr (kCount == 3) {  // the sum of all three minus the other two
    const auto sum = [](int a, int b, int c) { return static_cast<unsigned>(a) + b + c; };
    return static_cast<int>(sum(of[0], of[1], of[2]) - best - greatest(of[0], of[1], of[2]));
  } else if constexpr (kCount == 4) {
    return least(greater(of[0], of[1]), greater(of[2], of[3]),
                 greater(lesser(of[0], of[1]), lesser(of[2], of[3])));
  } else {
    const GridMinima<kCount> grid(of);
    return lesser(second_of(grid.rows, best), second_of(grid.columns, best));
  }
}

// The best and the second-best score so far, and the tile of the best one.
struct TileTopTwo {
  PackedTopTwo found;
  int tile = 0;

  // Adds the packed scores of a tile.
  template <int kCount>
  __device__ void add(const int (&scores)[kCount], int number) {
    int all[kCount + 1];
    UEFL_UNROLL
    for (int i = 0; i < kCount; ++i) all[i] = scores[i];
    all[kCount] = found.best;
    int best;
    if constexpr (kCount == 2) {
      best = least_of<3>(all), found.second = lesser(found.second, second_of(all, best));
    } else {
      const GridMinima<kCount + 1> grid(all);
      best = least_of<3>(grid.rows);
      found.second = least(found.second, second_of(grid.rows, best), second_of(grid.columns, best));
    }
    tile = best < found.best ? number : tile;
    found.best = best;
  }
};

// The best and the second-best score of a whole row, and the codeword of the best one.
struct TopTwo {
  int best, second, index;

  __device__ void merge(int other_best, int other_second, int other_index) {
    index = other_best < best ? other_index : index;
    second = least(second, other_second, greater(best, other_best));
    best = lesser(best, other_best);
  }
};

// Returns the codeword of a packed score of lane t, in tiles of 4 kColumns codewords. Lane t of a quad has
// columns 2 t and 2 t + 1 of every eight codewords.
template <int kColumns>
__device__ inline int codeword_of(int tile, int packed_score, int t) {
  const int column = packed_score & ((1 << kColumnBits) - 1);
  return tile * (4 * kColumns) + column / 2 * 8 + t * 2 + column % 2;
}

// Returns the best and the second-best score of the four lanes of a row.
template <int kColumns>
__device__ inline TopTwo merge_quad(const TileTopTwo& top) {
  TopTwo all{top.found.best, top.found.second,
             codeword_of<kColumns>(top.tile, top.found.best, static_cast<int>(threadIdx.x % 4))};
  UEFL_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    all.merge(__shfl_xor_sync(kAllLanes, all.best, step), __shfl_xor_sync(kAllLanes, all.second, step),
              __shfl_xor_sync(kAllLanes, all.index, step));
  }
  return all;
}

// The row for which a lane scores codewords again: lanes 4 g and 4 g + 1 take row g of a warp, and the other
// two lanes of the quad take row g + 8.
constexpr int kWarpRows = 16;
__device__ inline int row_of(int lane) { return lane / 4 + lane % 4 / 2 * 8; }

// Returns codeword `which`, 0 to 3, of the group of four that begins with `first`.
__device__ inline int code_in_group(int first, int which) { return first + which / 2 * 8 + which % 2; }

// Scores the four codewords of the best group of every row again. A lane has two of the four, for the row of
// row_of().
struct GroupScores {
  int best_code, lane;
  float dot[2] = {};

  // If scores are equal, the two lanes of a row may have chosen different groups: both take the first lane's
  // group.
  __device__ GroupScores(int code, int of_lane)
      : best_code(__shfl_sync(kAllLanes, code, of_lane & ~1)), lane(of_lane) {}

  // Adds a chunk of the 16 rows of the warp and of the blocks of codewords. One product serves rows g and g +
  // 8, with the four codewords of each.
  template <class Codewords>
  __device__ void add(const void* rows, const Codewords& codewords) {
    const int g = lane / 4, t = lane % 4;
    // A lane takes eight neighbors of 32 elements, of rows and of codewords alike, for two products.
    const auto pieces = [&](const void* row, int number, int half) {
      return *reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(row) +
                                             ((4 * half + t) ^ number % 8) * 16);
    };
    uint4 left[2][2];
    UEFL_UNROLL
    for (int half = 0; half < 2; ++half) {
      UEFL_UNROLL
      for (int r = 0; r < 2; ++r)
        left[half][r] =
            pieces(static_cast<const unsigned char*>(rows) + (g + 8 * r) * (kBlockElements * 2), g, half);
    }
    UEFL_UNROLL_BY(2)
    for (int i = 0; i < kWarpRows / 2; ++i) {
      const int code = code_in_group(__shfl_sync(kAllLanes, best_code, 4 * i + g / 4 * 2), g % 4);
      const uint16_t* codeword = codewords(code / kBlockCodewords) + code % kBlockCodewords * kBlockElements;
      float sums[4] = {};
      UEFL_UNROLL
      for (int half = 0; half < 2; ++half) {
        const uint4 right = pieces(codeword, code, half);
        multiply_add(sums, {left[half][0].x, left[half][1].x, left[half][0].y, left[half][1].y}, right.x,
                     right.y);
        multiply_add(sums, {left[half][0].z, left[half][1].z, left[half][0].w, left[half][1].w}, right.z,
                     right.w);
      }
      if (g == i) dot[0] += t < 2 ? sums[0] : sums[2], dot[1] += t < 2 ? sums[1] : sums[3];
    }
  }

  // Returns the first of the two codewords of this lane.
  __device__ int code() const { return code_in_group(best_code, lane % 2 * 2); }

  // Returns the best and the second-best of the four scores. The products are subtracted from `start`.
  __device__ TopTwo result(const float2& start, float down, int shift) const {
    const int which = lane % 2 * 2;
    const int first = pack(fmaf(-dot[0], down, start.x), which, shift),
              second = pack(fmaf(-dot[1], down, start.y), which + 1, shift);
    PackedTopTwo found{lesser(first, second), greater(first, second)};
    found.add({__shfl_xor_sync(kAllLanes, found.best, 1), __shfl_xor_sync(kAllLanes, found.second, 1)});
    return {found.best, found.second, code_in_group(best_code, found.best & ((1 << kColumnBits) - 1))};
  }
};

// The bounds that certify the rows of a codebook. Their computation uses float64, so it runs once per
// codebook.
struct RowBounds {
  Certificate certificate;
  ScoreBase base;
  float longest, down;  // longest: the largest norm for which the bounds hold

  RowBounds() = default;
  __device__ RowBounds(const Shape& shape, const PackedCodebook& packed, int64_t codebook, float scale_down)
      : certificate(shape, packed, codebook),
        base(base_of(packed, codebook)),
        longest(fminf(longest_row(packed, codebook), certificate.longest())),
        down(scale_down) {}
};

// The certificate of one row: `apart` tells whether a codeword is certainly farther away than the best one.
struct RowCertificate {
  float error;  // infinite if nothing is certain
  float unit;

  __device__ RowCertificate(float norm, float rest, const RowBounds& bounds)
      : error(norm <= bounds.longest ? bounds.certificate.error(norm, rest) + bounds.base.unit : INFINITY),
        unit(bounds.base.unit) {}
  __device__ bool holds() const { return error < INFINITY; }
  __device__ bool apart(int best, int other) const {
    return static_cast<float>((other >> kColumnBits) - (best >> kColumnBits)) * unit > 2.02f * error;
  }
  // Returns the largest score, above the base, that a candidate can have. NaN means that the definition
  // scores all codewords.
  __device__ float limit(int best, const ScoreBase& base) const {
    return holds() ? base.with_bits(best >> kColumnBits) + 2.2f * (error + unit) : NAN;
  }
};

// The rows that a warp leaves open in its first phase. Each warp has its own list, so that the order of the
// rows is the same in every run. Rows that are open between two codewords are at the end of the list.
struct OpenRows {
  const PackedCodebook& packed;
  const int64_t& room;           // entries of a list
  int list, count = 0, few = 0;  // list: its number among all lists; few: rows at the end

  __device__ OpenRows(const PackedCodebook& of, int number, const int64_t& rows)
      : packed(of), room(rows), list(number) {}

  // Return the place of row i in the array of all lists, from either end. It is computed again for every use,
  // to save registers.
  __device__ int64_t place(int i) const { return opaque(list) * room + i; }
  __device__ int64_t place_from_end(int i) const { return (opaque(list) + 1) * room - 1 - i; }

  // Append the open rows of a warp. All lanes of the warp call them.
  __device__ void push(bool open, int64_t output, float limit) {
    const unsigned votes = __ballot_sync(kAllLanes, open);
    if (open) packed.listed[place(count + earlier(votes))] = {output, {__float_as_int(limit), 0}};
    count += __popc(votes);
  }
  __device__ void push_few(bool open, const Listed& row) {
    const unsigned votes = __ballot_sync(kAllLanes, open);
    if (open) packed.listed[place_from_end(few + earlier(votes))] = row;
    few += __popc(votes);
  }

 private:
  // Returns how many lanes before this one are in the mask.
  __device__ static int earlier(unsigned votes) { return __popc(votes & ((1u << threadIdx.x % kWarp) - 1)); }
};

}  // namespace
}  // namespace uefl::cuda
