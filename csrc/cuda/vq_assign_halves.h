// What the searches on tensor cores share: the codebook in float16, the scale of a row, the two least scores, and the decision what of
// it is certain. The score of codeword k is |b|^2 / 2 - y.b with one float16 product (common/certificate.h); the rows that it cannot
// settle go on a list, which search() of vq_assign_kernels.h scores again in float32. Not run on a GPU yet.
//
// A thread has few columns of a tile of scores; it writes which of them a score is into the lowest mantissa bits and keeps the two least,
// so the order costs three minima a score. The four lanes of a row meet once, at the end.
#pragma once

#include "cuda/mma.h"
#include "cuda/vq_assign_kernels.h"

namespace uefl::cuda {
namespace {

constexpr float kNever = 0x1p127f;  // the score of what is no codeword

// A fragment of mma.sync takes elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16 from lane t of four. Rows and codewords may be in any
// order if it is the same: with element j at this place, a lane has four neighbours.
__device__ inline int fragment_place(int j) { return j / 16 * 16 + j % 16 / 4 * 2 + j % 4 / 2 * 8 + j % 2; }

// wgmma and ldmatrix read blocks of 128 codewords x 64 elements; in the 128 bytes of codeword k, 16 bytes number i are at place i ^ k % 8.
constexpr int kBlockCodes = 128, kBlockElements = 64, kBlockHalves = kBlockCodes * kBlockElements;
__device__ inline int swizzled(int row, int element) { return row * kBlockElements + (element ^ row % 8 * 8); }

// The codebook for the tensor cores, scaled so that its longest codeword has a length in [2^14, 2^15).
struct PackedHalves {
  uint16_t* codes;    // [books, padded_k, width] float16, zero where there is no finite codeword
  float* half_norms;  // [books, padded_k] as in Packed, kNever where there is no finite codeword
  double* rest;       // [books] the longest difference of a codeword and its float16, in units of the codes
  long long* counts;  // [books] rows on the list
  int64_t* listed;    // [books, outputs / books] outputs that the first pass left open
  int64_t padded_k;   // k rounded up to what the search takes at a time
  int width;          // d likewise
  bool blocks;        // codes are [books, padded_k / 128, width / 64] blocks

  __device__ uint16_t* element(int64_t book, int64_t k, int j) const {
    uint16_t* first = codes + book * padded_k * width;
    if (!blocks) return first + k * width + fragment_place(j);
    const int64_t block = k / kBlockCodes * (width / kBlockElements) + j / kBlockElements;
    return first + block * kBlockHalves + swizzled(static_cast<int>(k % kBlockCodes), j % kBlockElements);
  }
};

// 2^exponent, exponent in [-126, 127].
__device__ inline float power(int exponent) { return __int_as_float((exponent + 127) << 23); }

// e with 2^e <= value < 2^(e + 1), within limits for which every power of two below is a normal float.
__device__ inline int exponent_of(float value, int least, int most) {
  const int exponent = ((__float_as_int(value) >> 23) & 255) - 127;
  return exponent < least ? least : exponent > most ? most : exponent;
}
__device__ inline int book_exponent(const Packed& packed, int64_t book) {
  return exponent_of(static_cast<float>(packed.bounds[2 * book + 1]), -35, 60);
}

// One warp per codeword, those that pad included.
__global__ void pack_halves(Shape shape, Packed packed, PackedHalves halves) {
  const int64_t code = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (code >= shape.books * halves.padded_k) return;
  const int64_t book = code / halves.padded_k, k = code % halves.padded_k;
  const double* exact = packed.exact + book * shape.d * shape.padded_k + k;
  const bool finite = k < shape.k && !isnan(exact[0]);
  const double up = power(14 - book_exponent(packed, book));
  double rest = 0;
  for (int j = lane; j < halves.width; j += kWarp) {
    const double value = finite && j < shape.d ? (exact[j * shape.padded_k] - packed.mean[book * shape.d + j]) * up : 0;
    const uint16_t bits = to_half(static_cast<float>(value));
    *halves.element(book, k, j) = bits;
    rest += (value - from_half(bits)) * (value - from_half(bits));
  }
  rest = warp_sum(rest);
  if (lane != 0) return;
  halves.half_norms[code] = finite ? packed.half_norms[book * shape.padded_k + k] : kNever;
  atomicMax(reinterpret_cast<unsigned long long*>(halves.rest + book), __double_as_longlong(sqrt(rest)));
}

// Four neighbours, in one load.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T of[4];
};

template <class T>
__device__ inline Four<float> less_mean(const Four<T>& x, const Four<float>& mean) {
  Four<float> y;
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) y.of[i] = static_cast<float>(widen(x.of[i]) - mean.of[i]);
  return y;
}

// y = x - mu of a row that begins at x (nowhere: null), elements j to j + 3, j a multiple of four; zero beyond the row.
template <class T>
__device__ inline Four<float> centred_four(const T* x, const Shape& shape, const float* mean, int64_t j) {
  if (x == nullptr || j >= shape.d) return {};
  if (shape.stride == 1 && shape.d % 4 == 0 && reinterpret_cast<uintptr_t>(x) % sizeof(Four<T>) == 0) {
    return less_mean(*reinterpret_cast<const Four<T>*>(x + j), *reinterpret_cast<const Four<float>*>(mean + j));
  }
  Four<float> y{};
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (j + i < shape.d) y.of[i] = static_cast<float>(widen(x[(j + i) * shape.stride]) - mean[j + i]);
  }
  return y;
}

__device__ inline float squared(const Four<float>& y, float sum) {
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) sum = fmaf(y.of[i], y.of[i], sum);
  return sum;
}

// The length of a row y from its square, or a little more; infinity where it is not a number.
__device__ inline float row_norm(float square, int64_t d, int code_exponent) {
  const float norm = fmaxf(sqrtf(1.01f * square + static_cast<float>(d) * 0x1p-125f), power(code_exponent - 60));
  return isnan(square) ? INFINITY : norm;
}
// What takes a row to a length in [2^14, 2^15), and what takes its products with the packed codewords back.
__device__ inline float scale_up(float norm) { return power(14 - exponent_of(norm, -126, 60)); }
__device__ inline float scale_down(float norm, int code_exponent) { return power(exponent_of(norm, -126, 60) + code_exponent - 28); }

// The two least of packed scores, and the tile that the least is of.
struct PackedTopTwo {
  float best = INFINITY, second = INFINITY;
  int tile = 0;

  __device__ void add(float tile_best, float tile_second, int number) {
    tile = tile_best < best ? number : tile;
    second = fminf(fminf(second, tile_second), fmaxf(best, tile_best));
    best = fminf(best, tile_best);
  }
};

// Score number of kColumns, a power of two, that a thread has of a row in a tile.
template <int kColumns>
__device__ inline void keep_two(float score, int number, float& best, float& second) {
  const float packed_score = __int_as_float((__float_as_int(score) & ~(kColumns - 1)) | number);
  second = fminf(second, fmaxf(best, packed_score));
  best = fminf(best, packed_score);
}

// Columns 2 t and 2 t + 1 of every eight of a tile are those of lane t of four; this is the best of them.
template <int kColumns>
__device__ inline TopTwo unpacked(const PackedTopTwo& top) {
  const int number = __float_as_int(top.best) & (kColumns - 1);
  return {top.best, top.second, top.tile * (4 * kColumns) + number / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + number % 2};
}
__device__ inline void merge_quad(TopTwo& top) {
  UEFL_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    top.merge(__shfl_xor_sync(kAllLanes, top.best, step), __shfl_xor_sync(kAllLanes, top.second, step),
              __shfl_xor_sync(kAllLanes, top.index, step));
  }
}

// The answer of a row, written, put on the list unless it is certain, and handed on. All lanes of a warp call it, each with the output that
// it answers for or with -1.
template <int kColumns, class T>
__device__ inline void settle(const TopTwo& found, float norm, int64_t output, int64_t book, const T* x, const Shape& shape,
                              const Packed& packed, const PackedHalves& halves, bool exact, int64_t* indices, const Tail& tail) {
  const int64_t index = found.index < shape.k ? found.index : 0;  // beyond: of a row that is not finite
  bool certain = false;
  if (output >= 0) {
    const double rest = halves.rest[book] / power(14 - book_exponent(packed, book));
    const double error = score_error_fp16(shape.d, packed.bounds[2 * book], packed.bounds[2 * book + 1], rest, norm, shape.euclidean);
    const double numbers = kColumns * 0x1p-24 * (static_cast<double>(fabsf(found.best)) + fabsf(found.second));
    // Not certified, a row counts as certain too, but not one that float16 cannot hold: rescore() takes that at once.
    certain = norm < 0x1p60f && (exact ? static_cast<double>(found.second) - found.best > 2.02 * (error + numbers) : error < INFINITY);
    indices[output] = exact || certain ? index : -1;
  }
  if (exact && output >= 0 && !certain) {
    const auto at = atomicAdd(reinterpret_cast<unsigned long long*>(halves.counts + book), 1ull);
    halves.listed[book * (shape.outputs / shape.books) + static_cast<int64_t>(at)] = output;
  }
  if (tail.wanted()) finish(tail, x, shape, output, index, certain);
}

}  // namespace
}  // namespace uefl::cuda
