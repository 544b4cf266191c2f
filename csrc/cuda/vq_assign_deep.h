// The first pass of vq_assign with mma.sync (sm_80 and later) for codewords too long for registers. Not run on a GPU yet; run on the CPU,
// instruction by instruction, in the tests.
//
// A block keeps 64 rows in shared memory as float16 and goes through the codebook in blocks of 128 codewords x 64 elements, which stream
// through two buffers. Of the eight warps, each has 32 rows and 32 codewords of every product.
#pragma once

#include "cuda/vq_assign_halves.h"

namespace uefl::cuda {
namespace {

constexpr int kDeepRows = 64, kDeepColumns = 8, kParts = kThreads / kDeepRows;

// Bytes of dynamic shared memory, beside what the kernel declares.
constexpr int64_t kDeepStaticBytes = 4096;
UEFL_HOST_DEVICE inline int64_t deep_bytes(int64_t width) { return (width * kDeepRows + 2 * kBlockHalves) * 2; }

__device__ inline void copy_block(const uint16_t* block, uint16_t* buffer) {
  for (int i = threadIdx.x * 8; i < kBlockHalves; i += kThreads * 8) copy_async(buffer + i, block + i);
  commit_copies();
}

// The 16 x 16 elements from (row, j) on of a block, as load_matrices() takes them: rows, then elements for an operand of rows (of = 0),
// the other way round for one of codewords (of = 1).
__device__ inline const uint16_t* corner(const uint16_t* block, int row, int j, int of) {
  const int lane = threadIdx.x % kWarp, first = lane / 8 % 2 * 8, second = lane / 16 * 8;
  return block + swizzled(row + lane % 8 + (of == 0 ? first : second), j + (of == 0 ? second : first));
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    search_deep(const T* x, const __grid_constant__ Shape shape, Packed packed, PackedHalves halves, bool exact, int64_t* indices,
                const __grid_constant__ Tail tail) {
  __shared__ float squares[kParts][kDeepRows];
  __shared__ float bests[4][kDeepRows], seconds[4][kDeepRows];  // of the warps that share rows
  __shared__ int numbers[4][kDeepRows];
  uint16_t* rows = reinterpret_cast<uint16_t*>(dynamic_memory());  // [width / 64] blocks of 64 rows
  uint16_t* buffers = rows + halves.width * kDeepRows;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int warp_row = warp / 4 * 32, warp_code = warp % 4 * 32;
  // Neighbouring threads take what lies side by side.
  const int row = shape.stride == 1 ? threadIdx.x / kParts : threadIdx.x % kDeepRows;
  const int part = shape.stride == 1 ? threadIdx.x % kParts : threadIdx.x / kDeepRows;
  const int64_t count = shape.outputs / shape.books, tiles = (count + kDeepRows - 1) / kDeepRows * shape.books;
  const int chunks = halves.width / kBlockElements, code_blocks = static_cast<int>(halves.padded_k / kBlockCodes) * chunks;

  for (int64_t work = blockIdx.x; work < tiles; work += gridDim.x) {
    const int64_t book = work % shape.books, first_row = work / shape.books * kDeepRows;
    const float* mean = packed.mean + book * shape.d;
    const uint16_t* codes = halves.codes + book * halves.padded_k * halves.width;
    const int code_exponent = book_exponent(packed, book);
    copy_block(codes, buffers);

    // Read twice, the second time from the cache.
    const T* source = first_row + row < count ? x + shape.begin((first_row + row) * shape.books + book) : nullptr;
    float square = 0;
    for (int j = part * 4; j < shape.d; j += kParts * 4) square = squared(centred_four(source, shape, mean, j), square);
    squares[part][row] = square;
    __syncthreads();
    const auto norm_of = [&](int which) {
      float sum = 0;
      for (int i = 0; i < kParts; ++i) sum += squares[i][which];
      return row_norm(sum, shape.d, code_exponent);
    };
    const float up = scale_up(norm_of(row));
    for (int j = part * 4; j < halves.width; j += kParts * 4) {
      const Four<float> y = centred_four(source, shape, mean, j);
      Four<uint16_t> bits;
      UEFL_UNROLL
      for (int i = 0; i < 4; ++i) bits.of[i] = to_half(y.of[i] * up);
      uint16_t* block = rows + j / kBlockElements * (kDeepRows * kBlockElements);
      *reinterpret_cast<Four<uint16_t>*>(block + swizzled(row, j % kBlockElements)) = bits;
    }
    float down[4];  // row r of the thread: 8 r + g of those of the warp
    UEFL_UNROLL
    for (int r = 0; r < 4; ++r) down[r] = scale_down(norm_of(warp_row + 8 * r + g), code_exponent);

    PackedTopTwo top[4];
    float dot[2][4][4] = {};  // two times 16 rows, four times 8 codewords
    for (int number = 0; number < code_blocks; ++number) {
      const int chunk = number % chunks, code_tile = number / chunks;
      if (number + 1 < code_blocks) {
        copy_block(codes + int64_t{number + 1} * kBlockHalves, buffers + (number + 1) % 2 * kBlockHalves);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      const uint16_t* row_block = rows + chunk * (kDeepRows * kBlockElements);
      const uint16_t* code_block = buffers + number % 2 * kBlockHalves;
      UEFL_UNROLL
      for (int j = 0; j < kBlockElements; j += 16) {
        uint32_t left[2][4], right[2][4];
        UEFL_UNROLL
        for (int i = 0; i < 2; ++i) {
          load_matrices(left[i], corner(row_block, warp_row + 16 * i, j, 0));
          load_matrices(right[i], corner(code_block, warp_code + 16 * i, j, 1));
        }
        UEFL_UNROLL
        for (int i = 0; i < 2; ++i) {
          UEFL_UNROLL
          for (int c = 0; c < 4; ++c) multiply_add(dot[i][c], left[i], right[c / 2][c % 2 * 2], right[c / 2][c % 2 * 2 + 1]);
        }
      }
      __syncthreads();  // before the buffer is written again
      if (chunk + 1 < chunks) continue;
      const int part_of_codes = code_tile * 4 + warp % 4;  // 32 codewords
      const float* half_norm = halves.half_norms + book * halves.padded_k + part_of_codes * int64_t{4 * kDeepColumns} + 2 * t;
      UEFL_UNROLL
      for (int r = 0; r < 4; ++r) {
        float best = INFINITY, second = INFINITY;
        UEFL_UNROLL
        for (int i = 0; i < kDeepColumns; ++i) {
          float& product = dot[r / 2][i / 2][r % 2 * 2 + i % 2];
          keep_two<kDeepColumns>(fmaf(-product, down[r], half_norm[i / 2 * 8 + i % 2]), i, best, second);
          product = 0;
        }
        top[r].add(best, second, part_of_codes);
      }
    }

    UEFL_UNROLL
    for (int r = 0; r < 4; ++r) {
      TopTwo all = unpacked<kDeepColumns>(top[r]);
      merge_quad(all);
      if (t != r) continue;
      const int which = warp_row + 8 * r + g;
      bests[warp % 4][which] = all.best, seconds[warp % 4][which] = all.second, numbers[warp % 4][which] = all.index;
    }
    __syncthreads();
    if (warp < kDeepRows / 16) {  // 16 rows each, as finish() counts places
      TopTwo all;
      const int which = warp * 16 + lane % 16;
      for (int i = 0; i < 4; ++i) all.merge(bests[i][which], seconds[i][which], numbers[i][which]);
      const int64_t m = first_row + which;
      settle<kDeepColumns>(all, norm_of(which), lane < 16 && m < count ? m * shape.books + book : -1, book, x, shape, packed, halves, exact,
                           indices, tail);
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace uefl::cuda
