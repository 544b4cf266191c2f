// The first pass of vq_assign on tensor cores (sm_80 and later): one float16 product, certified; what it leaves open, search() of
// vq_assign_kernels.h scores again in float32. Not run on a GPU yet; run on the CPU, instruction by instruction, in the tests.
//
// A warp holds its rows as fragments in registers for the whole pass; codewords stream through two buffers in shared memory. A thread
// has two columns of eight of every score; it writes which of the scores of a tile it is into the lowest mantissa bits and keeps the
// two least, so the order costs three minima a score. The four lanes of a row meet once, at the end.
#pragma once

#include "cuda/mma.h"
#include "cuda/vq_assign_kernels.h"

namespace uefl::cuda {
namespace {

constexpr float kNever = 0x1p127f;  // the score of what is no codeword
constexpr int kTensorPadding = 64;  // codewords are padded to a multiple, which every tile divides

// The codebook for the tensor cores, scaled so that its longest codeword has a length in [2^14, 2^15).
struct PackedHalves {
  uint16_t* codes;    // [books, padded_k, width] float16, zero where there is no finite codeword
  float* half_norms;  // [books, padded_k] as in Packed, kNever where there is no finite codeword
  double* rest;       // [books] the longest difference of a codeword and its float16, in units of the codes
  long long* counts;  // [books] rows on the list
  int64_t* listed;    // [books, outputs / books] outputs that the first pass left open
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
__global__ void pack_halves(Shape shape, Packed packed, PackedHalves halves, int width) {
  const int64_t code = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (code >= shape.books * shape.padded_k) return;
  const int64_t book = code / shape.padded_k, k = code % shape.padded_k;
  const double* exact = packed.exact + book * shape.d * shape.padded_k + k;
  const bool finite = k < shape.k && !isnan(exact[0]);
  const double up = power(14 - book_exponent(packed, book));
  double rest = 0;
  for (int64_t j = lane; j < width; j += kWarp) {
    const double value = finite && j < shape.d ? (exact[j * shape.padded_k] - packed.mean[book * shape.d + j]) * up : 0;
    const uint16_t bits = to_half(static_cast<float>(value));
    halves.codes[code * width + j] = bits;
    rest += (value - from_half(bits)) * (value - from_half(bits));
  }
  rest = warp_sum(rest);
  if (lane != 0) return;
  halves.half_norms[code] = finite ? packed.half_norms[code] : kNever;
  atomicMax(reinterpret_cast<unsigned long long*>(halves.rest + book), __double_as_longlong(sqrt(rest)));
}

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

// kSteps: 16 elements each of a row; kGroups of 16 rows in a warp; kTile codewords at a time.
template <int kSteps>
struct Tiling {
  static constexpr int kWidth = 16 * kSteps, kGroups = kSteps <= 4 ? 2 : 1;
  static constexpr int kTile = kSteps <= 4 ? 64 : 32, kBlocks = kTile / 8;
  static constexpr int kStride = kWidth + 8;  // 16 bytes more, so that eight rows of a fragment lie in different banks
  static constexpr int kBlockRows = kThreads / kWarp * 16 * kGroups;
};

template <int kSteps>
__device__ inline void copy_tile(const uint16_t* codes, uint16_t* buffer) {
  using Tile = Tiling<kSteps>;
  for (int i = threadIdx.x; i < Tile::kTile * Tile::kWidth / 8; i += kThreads) {
    const int code = i / (Tile::kWidth / 8), j = i % (Tile::kWidth / 8) * 8;
    copy_async(buffer + code * Tile::kStride + j, codes + code * Tile::kWidth + j);
  }
  commit_copies();
}

// y = x - mu of one row, two elements; zero beyond it.
template <class T>
__device__ inline float centred(const T* x, const Shape& shape, int64_t begin, const float* mean, int64_t j) {
  return begin >= 0 && j < shape.d ? static_cast<float>(widen(x[begin + j * shape.stride]) - mean[j]) : 0;
}

template <class T, int kSteps>
__global__ void __launch_bounds__(kThreads, 1)
    search_tensor(const T* x, const __grid_constant__ Shape shape, Packed packed, PackedHalves halves, bool exact, int64_t* indices,
                  const __grid_constant__ Tail tail) {
  using Tile = Tiling<kSteps>;
  __shared__ __align__(16) uint16_t buffers[2][Tile::kTile * Tile::kStride];
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int64_t count = shape.outputs / shape.books, tiles = (count + Tile::kBlockRows - 1) / Tile::kBlockRows * shape.books;
  const int code_tiles = static_cast<int>(shape.padded_k / Tile::kTile);
  constexpr int kRowsOfThread = 2 * Tile::kGroups, kLost = 2 * Tile::kBlocks - 1;

  for (int64_t work = blockIdx.x; work < tiles; work += gridDim.x) {
    const int64_t book = work % shape.books;
    const int64_t first_row = work / shape.books * Tile::kBlockRows + threadIdx.x / kWarp * (16 * Tile::kGroups);
    const float* mean = packed.mean + book * shape.d;
    const uint16_t* codes = halves.codes + book * shape.padded_k * Tile::kWidth;
    const float* half_norms = halves.half_norms + book * shape.padded_k;
    const int code_exponent = book_exponent(packed, book);
    copy_tile<kSteps>(codes, buffers[0]);

    // Row r of the thread: 8 r + g of the rows of the warp. Scaled to a length in [2^14, 2^15). Read twice, the second time from the
    // cache: held in float32 meanwhile, the longest rows would not fit the registers.
    uint32_t rows[Tile::kGroups][kSteps][4];
    float norms[kRowsOfThread], down[kRowsOfThread];
    UEFL_UNROLL
    for (int r = 0; r < kRowsOfThread; ++r) {
      const int64_t m = first_row + 8 * r + g;
      const int64_t begin = m < count ? shape.begin(m * shape.books + book) : -1;
      const auto element = [&](int step, int i) { return centred(x, shape, begin, mean, step * 16 + i / 2 * 8 + 2 * t + i % 2); };
      float square = 0;
      for (int step = 0; step < kSteps; ++step) {
        UEFL_UNROLL
        for (int i = 0; i < 4; ++i) square = fmaf(element(step, i), element(step, i), square);
      }
      square += __shfl_xor_sync(kAllLanes, square, 1);
      square += __shfl_xor_sync(kAllLanes, square, 2);
      norms[r] = fmaxf(sqrtf(1.01f * square + shape.d * 0x1p-125f), power(code_exponent - 60));
      if (isnan(square)) norms[r] = INFINITY;
      const int exponent = exponent_of(norms[r], -126, 60);
      const float up = power(14 - exponent);
      down[r] = power(exponent + code_exponent - 28);
      UEFL_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        rows[r / 2][step][r % 2] = to_halves(element(step, 0) * up, element(step, 1) * up);
        rows[r / 2][step][2 + r % 2] = to_halves(element(step, 2) * up, element(step, 3) * up);
      }
    }

    PackedTopTwo top[kRowsOfThread];
    for (int tile = 0; tile < code_tiles; ++tile) {
      if (tile + 1 < code_tiles) {
        copy_tile<kSteps>(codes + int64_t{tile + 1} * Tile::kTile * Tile::kWidth, buffers[(tile + 1) % 2]);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      float best[kRowsOfThread], second[kRowsOfThread];
      UEFL_UNROLL
      for (int r = 0; r < kRowsOfThread; ++r) best[r] = second[r] = INFINITY;
      UEFL_UNROLL
      for (int block = 0; block < Tile::kBlocks; ++block) {
        float dot[Tile::kGroups][4] = {};
        UEFL_UNROLL
        for (int step = 0; step < kSteps; step += 2) {  // two steps of a fragment of codewords in one load
          uint32_t parts[4];
          const int j = kSteps == 1 ? lane / 8 % 2 * 8 : step * 16 + lane / 8 * 8;
          load_matrices(parts, buffers[tile % 2] + (block * 8 + lane % 8) * Tile::kStride + j);
          UEFL_UNROLL
          for (int group = 0; group < Tile::kGroups; ++group) {
            multiply_add(dot[group], rows[group][step], parts[0], parts[1]);
            if (kSteps > 1) multiply_add(dot[group], rows[group][kSteps > 1 ? step + 1 : 0], parts[2], parts[3]);
          }
        }
        const float* half_norm = half_norms + tile * int64_t{Tile::kTile} + block * 8 + 2 * t;
        UEFL_UNROLL
        for (int i = 0; i < 2; ++i) {
          UEFL_UNROLL
          for (int r = 0; r < kRowsOfThread; ++r) {
            const float score = fmaf(-dot[r / 2][r % 2 * 2 + i], down[r], half_norm[i]);
            const float packed_score = __int_as_float((__float_as_int(score) & ~kLost) | (2 * block + i));
            second[r] = fminf(second[r], fmaxf(best[r], packed_score));
            best[r] = fminf(best[r], packed_score);
          }
        }
      }
      UEFL_UNROLL
      for (int r = 0; r < kRowsOfThread; ++r) top[r].add(best[r], second[r], tile);
      __syncthreads();
    }

    TopTwo found;  // of the row that this lane answers for
    float norm = 0;
    UEFL_UNROLL
    for (int r = 0; r < kRowsOfThread; ++r) {
      const int number = __float_as_int(top[r].best) & kLost;
      TopTwo all;
      all.best = top[r].best, all.second = top[r].second;
      all.index = top[r].tile * Tile::kTile + number / 2 * 8 + 2 * t + number % 2;
      UEFL_UNROLL
      for (int step = 1; step <= 2; step *= 2) {
        all.merge(__shfl_xor_sync(kAllLanes, all.best, step), __shfl_xor_sync(kAllLanes, all.second, step),
                  __shfl_xor_sync(kAllLanes, all.index, step));
      }
      if (t == r) found = all, norm = norms[r];
    }
    const int64_t m = first_row + 8 * t + g, output = t < kRowsOfThread && m < count ? m * shape.books + book : -1;
    const int64_t index = found.index < shape.k ? found.index : 0;  // beyond: of a row that is not finite
    bool certain = !exact;
    if (output >= 0) {
      indices[output] = index;
      const double rest = halves.rest[book] / power(14 - code_exponent);
      const double error = score_error_fp16(shape.d, packed.bounds[2 * book], packed.bounds[2 * book + 1], rest, norm, shape.euclidean) +
                           (kLost + 1) * 0x1p-24 * (static_cast<double>(fabsf(found.best)) + fabsf(found.second));
      certain = certain || (norm < 0x1p60f && static_cast<double>(found.second) - found.best > 2.02 * error);
    }
    if (output >= 0 && !certain) {
      const auto place = atomicAdd(reinterpret_cast<unsigned long long*>(halves.counts + book), 1ull);
      halves.listed[book * count + static_cast<int64_t>(place)] = output;
    }
    if (tail.wanted()) finish(tail, x, shape, book, output, index, certain, first_row / 16 * shape.books + book);
  }
}

}  // namespace
}  // namespace uefl::cuda
