// vq_assign with mma.sync (sm_80 and later), for x of any type and strides: a whole first pass, and on every
// GPU the second one. The tests also run it on the CPU, instruction by instruction.
//
// A block keeps 64 rows in shared memory as float16 and goes through the codebook in blocks of 128 codewords
// x 64 elements, which stream through two buffers. Of the eight warps, each has 32 rows and 32 codewords of
// every product.
//
//   first   keeps the two least scores of a row, writes what is certain, and lists the other rows with a
//   limit: no codeword with a score above it can be the nearest
//   second  takes the rows of that list, some per cent; the codewords within the limit, two or three as a
//   rule, are candidates, and the
//           definition decides between them; rows with too many candidates are scored by the definition
//           against all codewords
#pragma once

#include "cuda/vq_assign_definition.h"
#include "cuda/vq_assign_scores.h"

namespace uefl::cuda {
namespace {

enum class Pass { first, second };

constexpr int kMmaRows = 64, kMmaColumns = kGroupColumns, kParts = kThreads / kMmaRows, kMostCandidates = 8;

// Bytes of dynamic shared memory, in addition to the arrays that the kernel declares.
constexpr int64_t kMmaStaticBytes = 10 * 1024;
UEFL_HOST_DEVICE inline int64_t mma_width(int64_t d) {
  return (d + kBlockElements - 1) / kBlockElements * kBlockElements;
}
UEFL_HOST_DEVICE inline int64_t mma_bytes(int64_t d) {
  return (mma_width(d) * kMmaRows + 2 * kBlockHalves) * 2;
}

__device__ inline void copy_block(const uint16_t* block, uint16_t* buffer) {
  for (int i = threadIdx.x * 8; i < kBlockHalves; i += kThreads * 8) copy_async(buffer + i, block + i);
  commit_copies();
}

// The 16 x 16 elements from (row, j) on of a block, as load_matrices() takes them: rows, then elements for an
// operand of rows (of = 0), the other way round for one of codewords (of = 1).
__device__ inline const uint16_t* corner(const uint16_t* block, int row, int j, int of) {
  const int lane = threadIdx.x % kWarp, first = lane / 8 % 2 * 8, second = lane / 16 * 8;
  return block + swizzled(row + lane % 8 + (of == 0 ? first : second), j + (of == 0 ? second : first));
}

// The state of a block for its rows.
struct MmaRows {
  float squares[kParts][kMmaRows], rests[kParts][kMmaRows];
  float norm[kMmaRows], rest[kMmaRows];
  // the first pass: of the warps that share rows
  int bests[4][kMmaRows], seconds[4][kMmaRows], numbers[4][kMmaRows];
  // the second
  float limits[kMmaRows];
  int found[kMmaRows], candidates[kMmaRows][kMostCandidates];
};

static_assert(sizeof(MmaRows) + kMmaRows / kWarp * sizeof(OpenRows::Rows) <= kMmaStaticBytes);

// The scores of a thread for one row against its limit, which few of them are within.
__device__ inline void note_candidates(const float (&scores)[kMmaColumns], int64_t first_code, int row,
                                       float limit, MmaRows& known) {
  float lowest = scores[0];
  UEFL_UNROLL
  for (int i = 1; i < kMmaColumns; ++i) lowest = fminf(lowest, scores[i]);
  if (!(lowest <= limit)) return;
  UEFL_UNROLL
  for (int i = 0; i < kMmaColumns; ++i) {
    if (!(scores[i] <= limit)) continue;
    const int place = atomicAdd(&known.found[row], 1);
    if (place < kMostCandidates)
      known.candidates[row][place] = static_cast<int>(first_code) + i / 2 * 8 + i % 2;
  }
}

// The rows of a block by the definition: four threads take the candidates of a row, then a warp each row that
// has too many, or none.
template <class T>
__device__ void decide(const T* x, const Shape& shape, const Packed& packed, int64_t book, int rows,
                       const int64_t* outputs, const MmaRows& known, int64_t* indices) {
  const double* codes = packed.exact + book * shape.k * shape.d;
  const int row = threadIdx.x / kParts, found = row < rows ? known.found[row] : 0;
  const bool listed = 0 < found && found <= kMostCandidates;
  Nearest nearer;
  for (int i = threadIdx.x % kParts; i < found && listed; i += kParts) {
    const int64_t code = known.candidates[row][i];
    nearer.add(distance(x + shape.begin(outputs[row]), shape.stride, codes + code * shape.d, shape.d,
                        shape.euclidean),
               code);
  }
  nearer.merge<kParts>();
  if (listed && threadIdx.x % kParts == 0) indices[outputs[row]] = nearer.index;
  for (int other = threadIdx.x / kWarp; other < rows; other += kThreads / kWarp) {
    if (0 < known.found[other] && known.found[other] <= kMostCandidates) continue;
    const int64_t index = nearest(x + shape.begin(outputs[other]), shape, codes);
    if (threadIdx.x % kWarp == 0) indices[outputs[other]] = index;
  }
}

template <class T, Pass kPass>
__global__ void __launch_bounds__(kThreads, 2)
    search_mma(const T* x, const __grid_constant__ Shape shape, const __grid_constant__ Packed packed,
               bool exact, int64_t* indices) {
  __shared__ MmaRows known;
  __shared__ OpenRows::Rows open_rows[kMmaRows / kWarp];
  uint16_t* rows = reinterpret_cast<uint16_t*>(dynamic_memory());  // [width / 64] blocks of 64 rows
  uint16_t* buffers = rows + mma_width(shape.d) * kMmaRows;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int warp_row = warp / 4 * 32, warp_code = warp % 4 * 32, width = static_cast<int>(mma_width(shape.d));
  // Neighbouring threads take what lies side by side.
  const int row = shape.stride == 1 ? threadIdx.x / kParts : threadIdx.x % kMmaRows;
  const int part = shape.stride == 1 ? threadIdx.x % kParts : threadIdx.x / kMmaRows;
  const int64_t all = shape.outputs / shape.books, tiles = (all + kMmaRows - 1) / kMmaRows * shape.books;
  const int chunks = width / kBlockElements,
            code_blocks = static_cast<int>(shape.padded_k / kBlockCodes) * chunks;
  OpenRows list{&open_rows[warp % 2]};  // of warps 0 and 1, which judge the rows

  for (int64_t work = blockIdx.x; work < tiles; work += gridDim.x) {
    const int64_t book = work % shape.books, first_row = work / shape.books * kMmaRows;
    const int64_t count = kPass == Pass::second ? packed.counts[book] : all;
    if (first_row >= count && shape.books == 1) break;
    if (first_row >= count) continue;
    const int64_t* listed = packed.listed + book * all + first_row;
    const auto output_of = [&](int which) {
      return kPass == Pass::second ? listed[which] : (first_row + which) * shape.books + book;
    };
    const float* centre = packed.centre + book * shape.d;
    const uint16_t* codes = packed.halves + book * shape.padded_k * width;
    const int code_exponent = book_exponent(packed, book);
    const Certificate certificate(shape, packed, book);
    copy_block(codes, buffers);

    // Read twice, the second time from the cache.
    const T* source = first_row + row < count ? x + shape.begin(output_of(row)) : nullptr;
    float square = 0, rest = 0;
    for (int j = part * 4; j < shape.d; j += kParts * 4)
      square = squared(centred_four(source, shape, centre, j), square);
    known.squares[part][row] = square;
    __syncthreads();
    const auto sum_of = [&](const float (&parts)[kParts][kMmaRows], int which) {
      float sum = 0;
      for (int i = 0; i < kParts; ++i) sum += parts[i][which];
      return sum;
    };
    const float norm = row_norm(sum_of(known.squares, row), shape.d, code_exponent), up = scale_up(norm);
    for (int j = part * 4; j < width; j += kParts * 4) {
      uint2 halves;
      halves_of(centred_four(source, shape, centre, j), up, halves.x, halves.y, rest);
      uint16_t* block = rows + j / kBlockElements * (kMmaRows * kBlockElements);
      *reinterpret_cast<uint2*>(block + swizzled(row, j % kBlockElements)) = halves;
    }
    known.rests[part][row] = rest;
    if (part == 0) {
      known.norm[row] = norm;
      known.found[row] = 0;
      known.limits[row] = kPass == Pass::second && source ? packed.limits[book * all + first_row + row] : NAN;
    }
    __syncthreads();
    if (part == 0) known.rest[row] = row_rest(sum_of(known.rests, row), norm);
    float longest = 0, down[4], limit[4];  // row r of the thread: row 8 r + g of the warp
    for (int i = lane; i < kMmaRows; i += kWarp)
      longest = fmaxf(longest, certificate.holds(known.norm[i]) ? known.norm[i] : 0);
    for (int step = kWarp / 2; step > 0; step /= 2)
      longest = fmaxf(longest, __shfl_xor_sync(kAllLanes, longest, step));
    const Base base(certificate.half_square, certificate.radius, longest);
    UEFL_UNROLL
    for (int r = 0; r < 4; ++r) {
      down[r] = scale_down(known.norm[warp_row + 8 * r + g], code_exponent),
      limit[r] = known.limits[warp_row + 8 * r + g];
    }

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
      const uint16_t* row_block = rows + chunk * (kMmaRows * kBlockElements);
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
          for (int c = 0; c < 4; ++c)
            multiply_add(dot[i][c], left[i], right[c / 2][c % 2 * 2], right[c / 2][c % 2 * 2 + 1]);
        }
      }
      __syncthreads();  // before the buffer is written again
      if (chunk + 1 < chunks) continue;
      const int part_of_codes = code_tile * 4 + warp % 4;  // 32 codewords
      const int64_t first_code = part_of_codes * int64_t{4 * kMmaColumns} + 2 * t;
      const float* half_norm = packed.half_norms + book * shape.padded_k + first_code;
      UEFL_UNROLL
      for (int r = 0; r < 4; ++r) {
        float scores[kMmaColumns];
        UEFL_UNROLL
        for (int i = 0; i < kMmaColumns; ++i) {
          float& product = dot[r / 2][i / 2][r % 2 * 2 + i % 2];
          const float half = half_norm[i / 2 * 8 + i % 2];
          scores[i] = fmaf(-product, down[r], kPass == Pass::first ? half + base.base : half);
          product = 0;
        }
        if constexpr (kPass == Pass::first) {
          int packed_scores[kMmaColumns];
          UEFL_UNROLL
          for (int i = 0; i < kMmaColumns; ++i) packed_scores[i] = pack(scores[i], i, packed.shift);
          top[r].add(two_least(packed_scores), part_of_codes);
        } else {
          note_candidates(scores, first_code, warp_row + 8 * r + g, limit[r], known);
        }
      }
    }

    if constexpr (kPass == Pass::second) {
      __syncthreads();
      const int64_t rows_here = count - first_row < kMmaRows ? count - first_row : kMmaRows;
      decide(x, shape, packed, book, static_cast<int>(rows_here), listed, known, indices);
    } else {
      UEFL_UNROLL
      for (int r = 0; r < 4; ++r) {
        const TopTwo of_warp = merge_quad<kMmaColumns>(top[r]);
        const int which = warp_row + 8 * r + g;
        if (t != r) continue;
        known.bests[warp % 4][which] = of_warp.best, known.seconds[warp % 4][which] = of_warp.second;
        known.numbers[warp % 4][which] = of_warp.index;
      }
      __syncthreads();
      if (warp < kMmaRows / kWarp) {
        const int which = warp * kWarp + lane;
        TopTwo all_codes{INT_MAX, INT_MAX, 0};
        for (int i = 0; i < 4; ++i)
          all_codes.merge(known.bests[i][which], known.seconds[i][which], known.numbers[i][which]);
        const bool there = first_row + which < count;
        const Verdict verdict(known.norm[which], known.rest[which], certificate, base);
        const bool certain = verdict.holds() && (!exact || verdict.apart(all_codes.best, all_codes.second));
        if (there && certain) indices[output_of(which)] = all_codes.index;
        list.push(there && !certain, output_of(which), verdict.limit(all_codes.best, base), packed, book,
                  shape);
        if (shape.books > 1) list.flush(packed, book, shape);
      }
    }
    __syncthreads();
  }
  if (shape.books == 1) list.flush(packed, 0, shape);
}

}  // namespace
}  // namespace uefl::cuda
