// The first pass of vq_assign with mma.sync (sm_80 and later), codewords of up to 128 elements. Not run on a GPU yet; run on the CPU,
// instruction by instruction, in the tests.
//
// A warp holds its rows as fragments in registers for the whole pass; codewords stream through two buffers in shared memory.
#pragma once

#include "cuda/vq_assign_halves.h"

namespace uefl::cuda {
namespace {

// kSteps: 16 elements each of a row; kGroups of 16 rows in a warp; kTile codewords at a time.
template <int kSteps>
struct Tiling {
  static constexpr int kWidth = 16 * kSteps, kGroups = kSteps <= 4 ? 2 : 1;
  static constexpr int kTile = kSteps <= 4 ? 64 : 32, kBlocks = kTile / 8, kColumns = kTile / 4;
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

template <class T, int kSteps>
__global__ void __launch_bounds__(kThreads, 1)
    search_tensor(const T* x, const __grid_constant__ Shape shape, Packed packed, PackedHalves halves, bool exact, int64_t* indices,
                  const __grid_constant__ Tail tail) {
  using Tile = Tiling<kSteps>;
  __shared__ __align__(16) uint16_t buffers[2][Tile::kTile * Tile::kStride];
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int64_t count = shape.outputs / shape.books, tiles = (count + Tile::kBlockRows - 1) / Tile::kBlockRows * shape.books;
  const int code_tiles = static_cast<int>(halves.padded_k / Tile::kTile);
  constexpr int kRowsOfThread = 2 * Tile::kGroups;

  for (int64_t work = blockIdx.x; work < tiles; work += gridDim.x) {
    const int64_t book = work % shape.books;
    const int64_t first_row = work / shape.books * Tile::kBlockRows + threadIdx.x / kWarp * (16 * Tile::kGroups);
    const float* mean = packed.mean + book * shape.d;
    const uint16_t* codes = halves.codes + book * halves.padded_k * Tile::kWidth;
    const float* half_norms = halves.half_norms + book * halves.padded_k;
    const int code_exponent = book_exponent(packed, book);
    copy_tile<kSteps>(codes, buffers[0]);

    // Row r of the thread: 8 r + g of the rows of the warp. Read twice, the second time from the cache: held in float32 meanwhile, the
    // longest rows would not fit the registers.
    uint32_t rows[Tile::kGroups][kSteps][4];
    float norms[kRowsOfThread], down[kRowsOfThread];
    UEFL_UNROLL
    for (int r = 0; r < kRowsOfThread; ++r) {
      const int64_t m = first_row + 8 * r + g;
      const T* row = m < count ? x + shape.begin(m * shape.books + book) : nullptr;
      const auto elements = [&](int step) { return centred_four(row, shape, mean, step * 16 + 4 * t); };
      float square = 0;
      for (int step = 0; step < kSteps; ++step) square = squared(elements(step), square);
      square += __shfl_xor_sync(kAllLanes, square, 1);
      square += __shfl_xor_sync(kAllLanes, square, 2);
      norms[r] = row_norm(square, shape.d, code_exponent);
      const float up = scale_up(norms[r]);
      down[r] = scale_down(norms[r], code_exponent);
      UEFL_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const Four<float> y = elements(step);
        rows[r / 2][step][r % 2] = to_halves(y.of[0] * up, y.of[1] * up);
        rows[r / 2][step][2 + r % 2] = to_halves(y.of[2] * up, y.of[3] * up);
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
            keep_two<Tile::kColumns>(fmaf(-dot[r / 2][r % 2 * 2 + i], down[r], half_norm[i]), 2 * block + i, best[r], second[r]);
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
      TopTwo all = unpacked<Tile::kColumns>(top[r]);
      merge_quad(all);
      if (t == r) found = all, norm = norms[r];
    }
    const int64_t m = first_row + 8 * t + g;
    settle<Tile::kColumns>(found, norm, t < kRowsOfThread && m < count ? m * shape.books + book : -1, book, x, shape, packed, halves, exact,
                           indices, tail);
  }
}

}  // namespace
}  // namespace uefl::cuda
