// The codebook as the searches read it, made anew by every call: three small kernels, one after the other, because each needs what the one
// before it found in the whole codebook (the centre, the longest codeword).
//
// Notation as in common/certificate.h: mu is the centre, b = c - mu a codeword less the centre.
#pragma once

#include <cstdint>

#include "common/certificate.h"
#include "cuda/mma.h"
#include "cuda/rows.h"

namespace uefl::cuda {
namespace {

// The score of what is no codeword: above all others, and so is what a shift by kColumnBits leaves of its bits, as a signed integer.
constexpr float kNever = 0x1.fffffep120f;
constexpr int kColumnBits = 5;  // of the number of a column beside a score; see vq_assign_scores.h

// wgmma and ldmatrix read blocks of 128 codewords x 64 elements; in the 128 bytes of codeword k, 16 bytes number i are at place i ^ k % 8.
constexpr int kBlockCodes = 128, kBlockElements = 64, kBlockHalves = kBlockCodes * kBlockElements;
__device__ inline int swizzled(int row, int element) { return row * kBlockElements + (element ^ row % 8 * 8); }

// A fragment of a product takes elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16 from lane t of four. Rows and codewords may be in
// any order if it is the same: with element j at this place, a lane has four neighbours.
__device__ inline int fragment_place(int j) { return j / 16 * 16 + j % 16 / 4 * 2 + j % 4 / 2 * 8 + j % 2; }

// Of 128 codewords, lane t of four has columns 2 t and 2 t + 1 of every eight: 32 that lie side by side here, and four more, so that the
// four lanes read from different banks.
constexpr int kStarts = 4 * 36;
__device__ inline int start_place(int column) { return column % 8 / 2 * 36 + column / 8 * 2 + column % 2; }

// A codeword with a NaN or an infinity is NaN throughout in exact, and no comparison lets it win.
struct Packed {
  double* exact;      // [books, k, d] codewords, of length one for cosine
  double* bounds;     // [books, 4] the largest |b|^2 / 2 (0 for cosine), |b|, |b - b1| in units of the halves, and |y| of some rows
  long long* counts;  // [books] rows on the list of the first pass
  float* centre;      // [books, d] mu, 0 for cosine
  float* half_norms;  // [books, padded_k] |b|^2 / 2 (0 for cosine), kNever where there is no finite codeword
  float* starts;      // [books, padded_k / 128, kStarts] the same above the base of wgmma's scores; see start_place()
  uint16_t* halves;   // [books, padded_k / 128, width / 64] blocks of float16, b scaled so that the longest has a length in
                      // [2^14, 2^15), zero where there is no finite codeword; or, for the search in float32,
  float* codes;       // [books, d, padded_k] b, zero where there is no codeword
  int64_t* listed;    // [books, outputs / books] outputs that the first pass left open, and
  float* limits;      // the score that a candidate has at most; NaN: score all codewords by the definition
  int shift = 1 << kColumnBits;  // a factor that the compiler must not know; see multiply_add_integer()
};

// 2^exponent, exponent in [-126, 127].
__device__ inline float power(int exponent) { return __int_as_float((exponent + 127) << 23); }

// e with 2^e <= value < 2^(e + 1), within limits for which every power of two below is a normal float.
__device__ inline int exponent_of(float value, int least, int most) {
  const int exponent = ((__float_as_int(value) >> 23) & 255) - 127;
  return exponent < least ? least : exponent > most ? most : exponent;
}
__device__ inline int book_exponent(const Packed& packed, int64_t book) {
  return exponent_of(static_cast<float>(packed.bounds[4 * book + 1]), -35, 60);
}

constexpr int kCentreThreads = 1024, kSampled = 1024;  // threads: at most

// The centre: the mean of up to 1024 codewords, spread over the book, in the columns in which it is large beside their deviation. Any
// centre is right. A large common offset would cost precision; a small one is better left alone, since 16-bit rows less a centre need
// more than the 11 bits of a float16, and without one do not. A block takes 32 columns of a book. Also zeroes what the next kernels
// raise.
template <class T>
__global__ void __launch_bounds__(kCentreThreads) pack_centre(const T* codebook, Shape shape, Packed packed) {
  __shared__ double sums[kCentreThreads / kWarp][kWarp], squares[kCentreThreads / kWarp][kWarp];
  const int64_t groups = (shape.d + kWarp - 1) / kWarp, book = blockIdx.x / groups;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const int64_t j = blockIdx.x % groups * kWarp + lane, apart = (shape.k + kSampled - 1) / kSampled;
  if (blockIdx.x % groups == 0 && warp == 0 && lane < 4) packed.bounds[4 * book + lane] = 0;
  if (blockIdx.x % groups == 0 && threadIdx.x == 0) packed.counts[book] = 0;
  double sum = 0, square = 0;
  for (int64_t k = warp * apart; k < shape.k && j < shape.d && shape.euclidean; k += warps * apart) {
    const double value = static_cast<double>(widen(codebook[(book * shape.k + k) * shape.d + j]));
    if (!isfinite(value)) continue;
    sum += value;
    square += value * value;
  }
  sums[warp][lane] = sum, squares[warp][lane] = square;
  __syncthreads();
  if (warp > 0 || j >= shape.d) return;
  for (int other = 1; other < warps; ++other) sum += sums[other][lane], square += squares[other][lane];
  const double count = static_cast<double>((shape.k + apart - 1) / apart), mean = sum / count;
  const bool large = mean * mean * 16 > square / count - mean * mean && fabs(mean) < 0x1p120;
  packed.centre[book * shape.d + j] = shape.euclidean && large ? static_cast<float>(mean) : 0;
}

// The largest value of the warps of a block into target. Doubles that are not negative order as their bits do.
__device__ inline void raise(double value, double* target) {
  __shared__ double largest[kThreads / kWarp];
  __syncthreads();
  if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / kWarp; ++warp) value = fmax(value, largest[warp]);
  if (value > 0) atomicMax(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(__double_as_longlong(value)));
}

// A block takes eight codewords of a book, a warp one, those that pad included: float64, of unit length for cosine, and its norm. The
// length for cosine is summed in the order of the elements, as the definition has it.
template <class T>
__global__ void __launch_bounds__(kThreads) pack_norms(const T* codebook, Shape shape, Packed packed) {
  const int lane = threadIdx.x % kWarp;
  const int64_t code = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarp, book = code / shape.padded_k, k = code % shape.padded_k;
  const bool there = k < shape.k;
  const T* source = codebook + (book * shape.k + k) * shape.d;
  bool finite = there;
  double length = 0, square = 0;
  for (int64_t start = 0; start < shape.d && there; start += kWarp) {
    const double value = start + lane < shape.d ? static_cast<double>(widen(source[start + lane])) : 0;
    finite = finite && isfinite(value);
    if (shape.euclidean) continue;
    for (int other = 0; other < kWarp; ++other) {
      const double element = __shfl_sync(kAllLanes, value, other);
      length = __dadd_rn(length, __dmul_rn(element, element));
    }
  }
  finite = __all_sync(kAllLanes, finite);
  length = __dsqrt_rn(length);
  double* target = packed.exact + (book * shape.k + k) * shape.d;
  for (int64_t j = lane; j < shape.d && there; j += kWarp) {
    double value = static_cast<double>(widen(source[j]));
    if (!shape.euclidean) value = length > 0 ? __ddiv_rn(value, length) : 0;
    target[j] = finite ? value : nan("");
    const double centred = value - packed.centre[book * shape.d + j];
    square += centred * centred;
  }
  square = warp_sum(square);
  if (lane == 0) packed.half_norms[code] = !finite ? kNever : shape.euclidean ? static_cast<float>(square / 2) : 0;
  raise(finite && shape.euclidean ? square / 2 : 0, packed.bounds + 4 * book);
  raise(finite ? sqrt(square) : 0, packed.bounds + 4 * book + 1);
}

// Rows shorter than that, and no NaN, have scores far below kNever and elements within float16; others no first pass answers. The radius
// is that of the codewords, or a little more.
__device__ inline float reach_of(const double* bounds, float radius) {
  return bounds[0] < 0x1p90 && bounds[1] < 0x1p59 ? fminf(0x1p60f, 0x1p90f / radius) : 0;
}

constexpr int kSampledRows = 1024;

// The longest of up to 1024 rows of each book, spread over x: for the range of wgmma's scores, which few rows may leave. A warp takes a
// row; those out of reach, NaN and infinity do not count, or one of them would leave no bits to the scores of all others.
template <class T>
__global__ void __launch_bounds__(kThreads) pack_reach(const T* x, Shape shape, Packed packed) {
  const int64_t rows = shape.outputs / shape.books, apart = (rows + kSampledRows - 1) / kSampledRows;
  const int64_t book = blockIdx.x % shape.books, m = (blockIdx.x / shape.books * (kThreads / kWarp) + threadIdx.x / kWarp) * apart;
  float square = 0;
  if (m < rows) {
    const T* row = x + shape.begin(m * shape.books + book);
    for (int64_t j = threadIdx.x % kWarp; j < shape.d; j += kWarp) {
      const float y = static_cast<float>(widen(row[j * shape.stride]) - packed.centre[book * shape.d + j]);
      square = fmaf(y, y, square);
    }
  }
  double* bounds = packed.bounds + 4 * book;
  const float norm = sqrtf(warp_sum(square));
  raise(norm < reach_of(bounds, static_cast<float>(bounds[1])) ? norm : 0, bounds + 3);
}

// The numbers base + score: base = 1.5 * 2^e with |score| < 2^(e - 1) for all rows up to a length.
struct Base {
  float base, unit;  // unit: the distance of neighbours

  Base() = default;
  __device__ Base(float half_square, float radius, float longest) {
    const float magnitude = 1.1f * (half_square + longest * radius);
    const int exponent = exponent_of(magnitude, -90, 100) + 2;
    base = 1.5f * power(exponent), unit = power(exponent - 23);
  }
  __device__ float score(int bits) const { return __int_as_float((__float_as_int(base) & 0x7f800000) | (bits & 0x007fffff)) - base; }
};

// For wgmma one base serves all rows of a book, up to 16 times as long as the longest of the sample: that takes four bits of the distance
// of two scores, which float16 has long lost.
__device__ inline float longest_row(const Packed& packed, int64_t book) { return 16 * static_cast<float>(packed.bounds[4 * book + 3]); }
__device__ inline Base base_of(const Packed& packed, int64_t book) {
  const double* bounds = packed.bounds + 4 * book;
  return {1.01f * static_cast<float>(bounds[0]), 1.01f * static_cast<float>(bounds[1]), longest_row(packed, book)};
}

// The operands of the tensor cores, and where wgmma's scores start.
__global__ void __launch_bounds__(kThreads) pack_halves(Shape shape, Packed packed) {
  const int lane = threadIdx.x % kWarp;
  const int64_t code = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarp, book = code / shape.padded_k, k = code % shape.padded_k;
  const double* exact = packed.exact + (book * shape.k + k) * shape.d;
  const bool finite = k < shape.k && !isnan(exact[0]);
  const double up = power(14 - book_exponent(packed, book));
  const int64_t chunks = (shape.d + kBlockElements - 1) / kBlockElements;
  uint16_t* blocks = packed.halves + code / kBlockCodes * chunks * kBlockHalves;
  double rest = 0;
  for (int64_t j = lane; j < chunks * kBlockElements; j += kWarp) {
    const double value = finite && j < shape.d ? (exact[j] - packed.centre[book * shape.d + j]) * up : 0;
    const uint16_t bits = to_half(static_cast<float>(value));
    blocks[j / kBlockElements * kBlockHalves + swizzled(static_cast<int>(k % kBlockCodes), fragment_place(j % kBlockElements))] = bits;
    rest += (value - from_half(bits)) * (value - from_half(bits));
  }
  if (lane == 0) {
    packed.starts[code / kBlockCodes * kStarts + start_place(static_cast<int>(k % kBlockCodes))] =
        packed.half_norms[code] + base_of(packed, book).base;
  }
  raise(sqrt(warp_sum(rest)), packed.bounds + 4 * book + 2);
}

// The same for the search in float32: transposed, so that neighbouring threads take what lies side by side.
__global__ void __launch_bounds__(kThreads) pack_float32(Shape shape, Packed packed) {
  const int64_t code = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarp, book = code / shape.padded_k, k = code % shape.padded_k;
  const double* exact = packed.exact + (book * shape.k + k) * shape.d;
  for (int64_t j = threadIdx.x % kWarp; j < shape.d; j += kWarp) {
    const double value = k < shape.k ? exact[j] - packed.centre[book * shape.d + j] : 0;
    packed.codes[(book * shape.d + j) * shape.padded_k + k] = static_cast<float>(value);
  }
}

}  // namespace
}  // namespace uefl::cuda
