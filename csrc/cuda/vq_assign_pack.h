// Packs the codebook for the searches. Every call does this in one launch. The first half measures the
// codewords. The second half writes them in units that follow from the longest codeword. All thread blocks
// meet at a barrier between the halves.
//
// Notation is as in common/certificate.h: mu is the center, and b = c - mu is a codeword minus the center.
#pragma once

#include <cstdint>

#include "common/certificate.h"
#include "cuda/grid.h"
#include "cuda/mma.h"
#include "cuda/rows.h"
#include "cuda/sums.h"

namespace uefl::cuda {
namespace {

// The score of padding. It is above all other scores, also after its bits are shifted by kColumnBits as a
// signed integer.
constexpr float kNever = 0x1.fffffep120f;
constexpr int kColumnBits = 5;  // bits for the column next to a score; see vq_assign_scores.h

// wgmma and ldmatrix read blocks of 128 codewords x 64 elements. In the 128 bytes of codeword k, the 16 bytes
// number i are at place i ^ k % 8.
constexpr int kBlockCodewords = 128, kBlockElements = 64, kBlockHalves = kBlockCodewords * kBlockElements;
__device__ inline int swizzled(int row, int element) {
  return row * kBlockElements + (element ^ row % 8 * 8);
}

// Of 128 codewords, lane t of a quad has columns 2 t and 2 t + 1 of every eight. Its 32 values are adjacent
// here. Four more values of padding let the four lanes read from different banks.
constexpr int kStarts = 4 * 36;
__device__ inline int start_place(int column) { return column % 8 / 2 * 36 + column / 8 * 2 + column % 2; }

// A row that the first phase leaves open. It is open between two codewords, or codes[0] has the bits of a
// float: the largest score of a candidate, or NaN if the definition scores all codewords.
struct alignas(16) Listed {
  int64_t output;
  int codes[2];

  __device__ float limit() const { return __int_as_float(codes[0]); }
};

// The packed codebooks. A codeword with a NaN or an infinity is NaN in all elements of `exact`, so it wins no
// comparison.
struct PackedCodebook {
  double* exact;    // [codebooks, k, d] codewords, with length one for cosine
  double* bounds;   // [codebooks, 4] the largest |b|^2 / 2 (0 for cosine), |b|, |b - b1| in units of the
                    // halves, and |y| of some rows
  float* center;    // [codebooks, d] mu, 0 for cosine
  double* longest;  // [codebooks, padded_k / kPackCodewords] the largest |b| of kPackCodewords codewords
  float* sampled;   // [codebooks, kSampledRows] |y| of rows that are spread over x
  float* starts;    // [codebooks, padded_k / 128, kStarts] where scores start: |b|^2 / 2 (0 for cosine) above
                    // the base; far above the base if the codeword is not finite; see start_place()
  uint16_t* halves;  // [codebooks, padded_k / 128, width / 64] blocks of float16; b is scaled so that the
                     // longest one has a length in [2^14, 2^15); zero if the codeword is not finite
  Listed* listed;    // [open_rows()] rows that are open after the first phase of a thread block
  int shift = 1 << kColumnBits;  // a factor that the compiler must not know; see multiply_add_integer()
};

// Returns 2^exponent, for an exponent in [-126, 127].
__device__ inline float power(int exponent) { return __int_as_float((exponent + 127) << 23); }

// Returns e with 2^e <= value < 2^(e + 1), within limits for which every power of two below is a normal
// float.
__device__ inline int exponent_of(float value, int least, int most) {
  const int exponent = ((__float_as_int(value) >> 23) & 255) - 127;
  return exponent < least ? least : exponent > most ? most : exponent;
}
__device__ inline int codebook_exponent(const double* bounds) {
  return exponent_of(static_cast<float>(bounds[1]), -35, 60);
}
__device__ inline int codebook_exponent(const PackedCodebook& packed, int64_t codebook) {
  return codebook_exponent(packed.bounds + 4 * codebook);
}

// The codewords that a thread block measures, and later writes, at a time: one per warp. kPackBlocks is the
// largest number of thread blocks on a multiprocessor.
constexpr int kPackCodewords = kThreads / kWarp, kPackBlocks = 2;
constexpr int kSampledRows = 1024;

// Computes the center: the mean of up to 64 codewords that are spread over the codebook. A column in which
// the mean is small compared with the deviation gets 0. Any center gives the correct result. A large common
// offset would cost precision. A small mean is not subtracted, because the difference of a 16-bit row and a
// center needs more than the 11 bits of a float16. Every thread block computes the same numbers, so no thread
// block waits for another one.
template <class T>
__device__ void make_center(const T* codewords, const Shape& shape, float* center) {
  constexpr int kColumns = 8, kParts = kWarp / kColumns,
                kEach = 16;  // in a warp: columns, lanes of a column, codewords of a lane
  const int lane = threadIdx.x % kWarp;
  const int64_t apart = (shape.k + kParts * kEach - 1) / (kParts * kEach);
  const float count = static_cast<float>((shape.k + apart - 1) / apart);
  for (int64_t first = threadIdx.x / kWarp * kColumns; first < shape.d;
       first += kThreads / kWarp * kColumns) {
    const int64_t j = first + lane % kColumns;
    float values[kEach], sum = 0, square = 0;
    UEFL_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int64_t k = (i * kParts + lane / kColumns) * apart;
      values[i] = shape.euclidean && j < shape.d && k < shape.k
                      ? static_cast<float>(widen(codewords[k * shape.d + j]))
                      : 0;
    }
    UEFL_UNROLL
    for (int i = 0; i < kEach; ++i) {
      if (fabsf(values[i]) < INFINITY) sum += values[i], square = fmaf(values[i], values[i], square);
    }
    for (int step = kColumns; step < kWarp; step *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
      square += __shfl_xor_sync(kAllLanes, square, step);
    }
    const float mean = sum / count;
    const bool large = mean * mean * 4 > square / count - mean * mean && fabsf(mean) < 0x1p120f;
    if (lane < kColumns && j < shape.d) center[j] = large ? mean : 0;
  }
}

// Returns the largest value of the threads of a thread block, to all of them.
template <class T>
__device__ T block_largest(T value) {
  __shared__ T of_warps[kThreads / kWarp];
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / kWarp; ++warp) value = of_warps[warp] > value ? of_warps[warp] : value;
  return value;
}

// Returns where the scores of a codeword start, in the codebook that begins with tile first_tile of 128
// codewords.
__device__ inline float* start_of(const PackedCodebook& packed, int first_tile, int code) {
  return packed.starts + int64_t{first_tile + code / kBlockCodewords} * kStarts +
         start_place(code % kBlockCodewords);
}
__device__ inline int first_tile_of(const Shape& shape, int64_t codebook) {
  return static_cast<int>(codebook * (shape.padded_k / kBlockCodewords));
}

// Measures one codeword with one warp, in float64, and with unit length for cosine. The codeword may be
// padding. The length for cosine is summed in the order of the elements, as in the definition. Returns |b|,
// or zero if the codeword is not finite.
template <class T>
__device__ double measure_codeword(const T* codewords, const Shape& shape, const PackedCodebook& packed,
                                   int64_t code) {
  const int lane = threadIdx.x % kWarp;
  const int64_t codebook = code / shape.padded_k, k = code % shape.padded_k;
  const bool there = k < shape.k;
  const T* source = codewords + (codebook * shape.k + k) * shape.d;
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
  double* target = packed.exact + (codebook * shape.k + k) * shape.d;
  for (int64_t j = lane; j < shape.d && there; j += kWarp) {
    double value = static_cast<double>(widen(source[j]));
    if (!shape.euclidean) value = length > 0 ? __ddiv_rn(value, length) : 0;
    target[j] = finite ? value : nan("");
    const double centered = value - packed.center[codebook * shape.d + j];
    square += centered * centered;
  }
  square = warp_sum(square);
  if (lane == 0)
    *start_of(packed, first_tile_of(shape, codebook), static_cast<int>(k)) =
        !finite           ? kNever
        : shape.euclidean ? static_cast<float>(square / 2)
                          : 0;
  return finite ? sqrt(square) : 0;
}

// Returns the norm of a row minus the center. All lanes of a warp call it.
template <class T>
__device__ float measure_row(const T* row, const Shape& shape, const float* center) {
  float square = 0;
  for (int64_t j = threadIdx.x % kWarp; j < shape.d; j += kWarp) {
    const float y = static_cast<float>(widen(row[j * shape.stride]) - center[j]);
    square = fmaf(y, y, square);
  }
  return sqrtf(warp_sum(square));
}

// The limits of the first phase. The scores of a row are far below kNever and its elements fit a float16 if
// it has no NaN, its norm is below reach_of(), and the product of its norm and the longest codeword is below
// kLargestProduct. The first phase leaves all other rows open.
constexpr float kLargestProduct = 0x1p90f;
__device__ inline float reach_of(const double* bounds) {
  return bounds[0] < 0x1p90 && bounds[1] < 0x1p59 ? 0x1p60f : 0;
}

// The numbers base + score, where base = 1.5 * 2^e and |score| < 2^(e - 1) for all rows up to a length.
struct ScoreBase {
  float base, unit;  // unit: the distance of neighbors

  ScoreBase() = default;
  __device__ ScoreBase(float half_square, float radius, float longest) {
    const float magnitude = 1.1f * (half_square + longest * radius);
    const int exponent = exponent_of(magnitude, -90, 100) + 2;
    base = 1.5f * power(exponent), unit = power(exponent - 23);
  }
  // Returns the number with these last bits.
  __device__ float with_bits(int bits) const {
    return __int_as_float((__float_as_int(base) & 0x7f800000) | (bits & 0x007fffff));
  }
};

// Returns the least norm of a row: shorter rows count as if they had this norm. The product of the smallest
// scales of rows and of codewords is then a normal number.
__device__ inline float least_norm(int code_exponent) {
  return power(code_exponent - 60 > -98 - code_exponent ? code_exponent - 60 : -98 - code_exponent);
}

// Returns the length of the longest row that the first phase takes. One base and one power of two serve all
// rows of a codebook, up to 16 times the longest row of the sample. This costs four bits of the distance
// between two scores, which float16 does not resolve.
__device__ inline float longest_row(const double* bounds) {
  return fmaxf(16 * static_cast<float>(bounds[3]), least_norm(codebook_exponent(bounds)));
}
__device__ inline float longest_row(const PackedCodebook& packed, int64_t codebook) {
  return longest_row(packed.bounds + 4 * codebook);
}
__device__ inline ScoreBase base_of(const double* bounds) {
  return {1.01f * static_cast<float>(bounds[0]), 1.01f * static_cast<float>(bounds[1]), longest_row(bounds)};
}
__device__ inline ScoreBase base_of(const PackedCodebook& packed, int64_t codebook) {
  return base_of(packed.bounds + 4 * codebook);
}

// Runs the first half for a thread block: computes the center, then measures codewords and the lengths of
// some rows.
template <class Codeword, class Row>
__device__ void measure(const Codeword* codewords, const Row* rows, const Shape& shape,
                        const PackedCodebook& packed) {
  const int64_t tiles = shape.padded_k / kPackCodewords, samples = kSampledRows / kPackCodewords;
  const int64_t all = shape.outputs / shape.codebooks, apart = (all + kSampledRows - 1) / kSampledRows;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int64_t known = -1;  // this thread block has written the center of this codebook
  for (int64_t item = blockIdx.x; item < shape.codebooks * (tiles + samples); item += gridDim.x) {
    const int64_t codebook = item / (tiles + samples), tile = item % (tiles + samples);
    if (codebook != known)
      make_center(codewords + codebook * shape.k * shape.d, shape, packed.center + codebook * shape.d);
    known = codebook;
    __syncthreads();
    if (tile == 0 && threadIdx.x == 0) packed.bounds[4 * codebook + 2] = 0;
    if (tile < tiles) {
      const double length = block_largest(measure_codeword(
          codewords, shape, packed, codebook * shape.padded_k + tile * kPackCodewords + warp));
      if (threadIdx.x == 0) packed.longest[codebook * tiles + tile] = length;
    } else {
      const int64_t sample = (tile - tiles) * kPackCodewords + warp, m = sample * apart;
      const float length = m < all ? measure_row(rows + shape.begin(m * shape.codebooks + codebook), shape,
                                                 packed.center + codebook * shape.d)
                                   : 0;
      if (lane == 0) packed.sampled[codebook * kSampledRows + sample] = length;
    }
  }
}

// Finds the bounds of a codebook except T. All threads of the thread block get them. Rows out of reach, NaN,
// infinity and rows far above the geometric mean do not count. Otherwise one such row would leave no bits for
// the other scores.
__device__ inline void find_bounds(const Shape& shape, const PackedCodebook& packed, int64_t codebook,
                                   double (&bounds)[4]) {
  const int64_t tiles = shape.padded_k / kPackCodewords;
  double length = 0;
  for (int64_t tile = threadIdx.x; tile < tiles; tile += kThreads)
    length = fmax(length, packed.longest[codebook * tiles + tile]);
  bounds[1] = block_largest(length), bounds[0] = shape.euclidean ? bounds[1] * bounds[1] / 2 : 0;
  const float reach = reach_of(bounds);
  float row = 0;
  int count = 0, exponents = 0;
  for (int i = threadIdx.x; i < kSampledRows; i += kThreads) {
    const float norm = packed.sampled[codebook * kSampledRows + i];
    if (!(0 < norm && norm < reach && norm * bounds[1] < kLargestProduct)) continue;
    row = fmaxf(row, norm), exponents += exponent_of(norm, -126, 60), ++count;
  }
  count = warp_sum(count), exponents = warp_sum(exponents);
  bounds[2] = 0, bounds[3] = block_largest(count > 0 ? fminf(row, power(exponents / count + 4)) : 0);
}

// Writes an operand of the tensor cores with one warp, and where its scores start. Returns |b - b1| in units
// of the halves.
__device__ inline double write_halves(const Shape& shape, const PackedCodebook& packed, int64_t code,
                                      const double (&bounds)[4]) {
  const int lane = threadIdx.x % kWarp;
  const int64_t codebook = code / shape.padded_k, k = code % shape.padded_k;
  const double* exact = packed.exact + (codebook * shape.k + k) * shape.d;
  const bool finite = k < shape.k && !isnan(exact[0]);
  const double up = power(14 - codebook_exponent(bounds));
  const int64_t chunks = (shape.d + kBlockElements - 1) / kBlockElements;
  uint16_t* blocks = packed.halves + code / kBlockCodewords * chunks * kBlockHalves;
  double rest = 0;
  for (int64_t j = lane; j < chunks * kBlockElements; j += kWarp) {
    const double value = finite && j < shape.d ? (exact[j] - packed.center[codebook * shape.d + j]) * up : 0;
    const uint16_t bits = to_half(static_cast<float>(value));
    blocks[j / kBlockElements * kBlockHalves +
           swizzled(static_cast<int>(k % kBlockCodewords), static_cast<int>(j % kBlockElements))] = bits;
    rest += (value - from_half(bits)) * (value - from_half(bits));
  }
  if (lane == 0)
    *start_of(packed, first_tile_of(shape, codebook), static_cast<int>(k)) += base_of(bounds).base;
  return sqrt(warp_sum(rest));
}

// Runs the second half for a thread block. It reads nothing that shared memory held before the barrier.
__device__ inline void write_operands(const Shape& shape, const PackedCodebook& packed) {
  const int64_t tiles = shape.padded_k / kPackCodewords;
  int64_t known = -1;
  double bounds[4] = {};
  for (int64_t item = blockIdx.x; item < shape.codebooks * tiles; item += gridDim.x) {
    const int64_t codebook = item / tiles, code = item * kPackCodewords + threadIdx.x / kWarp;
    if (codebook != known) find_bounds(shape, packed, codebook, bounds);
    known = codebook;
    double* target = packed.bounds + 4 * codebook;
    if (item % tiles == 0 && threadIdx.x == 0)
      target[0] = bounds[0], target[1] = bounds[1], target[3] = bounds[3];
    const double rest =
        block_largest(write_halves(shape, packed, code, bounds));  // the bits of doubles that are not
                                                                   // negative order as the doubles do
    if (threadIdx.x == 0) {
      atomicMax(reinterpret_cast<unsigned long long*>(target + 2),
                static_cast<unsigned long long>(__double_as_longlong(rest)));
    }
  }
}

// Packs the codebooks, and clears the arrays to which later kernels add. The launch is cooperative, with at
// most kPackBlocks thread blocks on a multiprocessor.
template <class Codeword, class Row>
__global__ void __launch_bounds__(kThreads, kPackBlocks)
    pack_codebook(const Codeword* codewords, const Row* rows, const __grid_constant__ Shape shape,
                  const __grid_constant__ PackedCodebook packed, const __grid_constant__ Spans cleared) {
  clear_spans(cleared);
  measure(codewords, rows, shape, packed);
  grid_barrier();
  write_operands(shape, packed);
}

}  // namespace
}  // namespace uefl::cuda
