// Computes the results of vq from indices: the codewords, the error and the counts, in one pass at the speed
// of a copy.
//
// A warp takes a tile of at most 32 rows that are adjacent in memory, and cuts it into pieces of 16 bytes of
// x. Its lanes take the pieces in turn, and each lane has several in flight. So every access of a warp has
// whole sectors, for any d. A piece is one element if the alignment and the strides allow no larger one.
//
// Bytes: x and quantized once each, and 8 for an index. The codewords come from the caches.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/mma.h"
#include "cuda/rows.h"
#include "cuda/sums.h"

namespace uefl::cuda {
namespace {

constexpr int kGatherBlocks = 3;     // thread blocks on a multiprocessor
constexpr int kMostCounters = 4096;  // codewords that a thread block counts in shared memory
constexpr int kTilePieces =
    512;  // of a warp; tiles of long rows are small, so that few rows give work to all warps

// The number of elements in 16 bytes of x. float64 is read one element at a time.
template <class T>
constexpr int kPieceOf = sizeof(T) < sizeof(double) ? 16 / sizeof(T) : 1;

// Stores a piece in one access, while the compiler would split an assignment. The piece leaves the caches
// first, so that the codewords stay in them.
template <class T, int kCount>
__device__ void store(const Piece<T, kCount>& piece, T* target) {
  if constexpr (kCount > 1 && sizeof piece <= sizeof(float4)) {
    using Whole = std::conditional_t<sizeof piece == sizeof(float4), float4, float2>;
    Whole whole;
    static_assert(sizeof whole == sizeof piece);
    memcpy(static_cast<void*>(&whole), &piece, sizeof whole);
    __stcs(reinterpret_cast<Whole*>(target), whole);
  } else {
    *reinterpret_cast<Piece<T, kCount>*>(target) = piece;
  }
}

// Quantizes a piece of a row to the same piece of its codeword. Returns the error.
template <class T, class Codeword, int kCount>
__device__ double quantize(const Piece<T, kCount>& value, const Piece<Codeword, kCount>& close, T* target) {
  using Wide =
      std::conditional_t<sizeof(T) == sizeof(double) || sizeof(Codeword) == sizeof(double), double, float>;
  Wide exact[kCount], codeword[kCount];
  Piece<T, kCount> rounded;
  UEFL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    exact[j] = widen(value.values[j]), codeword[j] = close.values[j];
    narrow(codeword[j], rounded.values[j]);
  }
  store(rounded, target);
  return squares(exact, codeword);
}

template <class T, class Codeword>
struct Gather {
  const Codeword* codewords;  // [codewords, d]
  const int64_t* indices;     // [outputs]
  T* quantized;               // [outputs, d]
  long long* counts;          // [codewords], zeroed
  Total error;
  int tile;     // rows of a tile, a multiple of abreast
  int abreast;  // rows that a warp reads together: 8 if elements of a row are apart, since elements of eight
                // rows may then be adjacent
  bool in_counters;  // a thread block first counts in shared memory, with 4 bytes for each codeword
};

// Chooses the tiles and the place of the counts, for a grid of at most most_blocks thread blocks. Returns the
// number of thread blocks.
template <class T, class Codeword>
int64_t divide_rows(Gather<T, Codeword>& wanted, const Shape& shape, int piece, int64_t most_blocks) {
  wanted.abreast = shape.stride == 1 ? 1 : 8;
  wanted.tile = kWarp;
  while (wanted.tile > wanted.abreast && wanted.tile * (shape.d / piece) > kTilePieces) wanted.tile /= 2;
  const int64_t rows = int64_t{wanted.tile} * (kThreads / kWarp), codewords = shape.codebooks * shape.k;
  const int64_t needed = (shape.outputs + rows - 1) / rows,
                blocks = needed < most_blocks ? needed : most_blocks;
  wanted.in_counters = codewords <= kMostCounters && codewords * blocks <= shape.outputs;
  return blocks;
}

// The pieces of a tile that a lane takes. The lanes that share a row step by a fixed number of pieces, from
// the end of a row to the beginning of their next row.
struct TileSteps {
  int first_row, first_piece, row_step, piece_step, pieces, abreast;

  __device__ TileSteps(int lane, int pieces, int abreast) : pieces(pieces), abreast(abreast) {
    const int together = kWarp / abreast;
    first_row = lane / abreast / pieces * abreast + lane % abreast, first_piece = lane / abreast % pieces;
    row_step = together / pieces * abreast, piece_step = together % pieces;
  }

  __device__ void advance(int& row, int& piece) const {
    row += row_step, piece += piece_step;
    if (piece >= pieces) piece -= pieces, row += abreast;
  }
};

template <class T, class Codeword, int kPiece>
__global__ void __launch_bounds__(kThreads, kGatherBlocks)
    gather(const T* x, Shape shape, Gather<T, Codeword> wanted) {
  constexpr int kPieces = kPiece > 4 ? 2 : 4;  // pieces of a lane under way
  const int lane = threadIdx.x % kWarp, d = static_cast<int>(shape.d), pieces = d / kPiece;
  const int codewords = static_cast<int>(shape.codebooks * shape.k);
  int* counters = reinterpret_cast<int*>(dynamic_memory());
  for (int code = threadIdx.x; wanted.in_counters && code < codewords; code += blockDim.x) counters[code] = 0;
  __syncthreads();

  const TileSteps tile_steps(lane, pieces, wanted.abreast);
  const int steps = (wanted.tile * pieces + kWarp - 1) / kWarp;
  const int64_t warp = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kWarp,
                warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  double error = 0;
  for (int64_t first = warp * wanted.tile; first < shape.outputs; first += warps * wanted.tile) {
    const int rows =
        static_cast<int>(shape.outputs - first < wanted.tile ? shape.outputs - first : wanted.tile);
    const int code = lane < rows ? code_of(shape, wanted.indices, first + lane) : -1;
    const int64_t begin = lane < rows ? shape.begin(first + lane) : 0;
    int row = tile_steps.first_row, piece = tile_steps.first_piece;
    for (int step = 0; step < steps; step += kPieces) {
      Piece<T, kPiece> value[kPieces];
      Piece<Codeword, kPiece> close[kPieces];
      int target[kPieces];  // within the tile
      UEFL_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const bool there = row < rows;
        const int from = there ? row : 0, column = piece * kPiece;
        const T* source = x + __shfl_sync(kAllLanes, begin, from) + column * shape.stride;
        const Codeword* codeword =
            wanted.codewords + int64_t{__shfl_sync(kAllLanes, code, from)} * d + column;
        target[i] = there ? row * d + column : -1;
        if (there) {
          value[i] = *reinterpret_cast<const Piece<T, kPiece>*>(source);
          close[i] = *reinterpret_cast<const Piece<Codeword, kPiece>*>(codeword);
        }
        tile_steps.advance(row, piece);
      }
      UEFL_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        if (target[i] < 0) continue;
        error += quantize(value[i], close[i], wanted.quantized + first * d + target[i]);
      }
    }
    const unsigned same = __match_any_sync(kAllLanes, code);
    if (code < 0 || !is_first_lane(same)) continue;
    wanted.in_counters ? (void)atomicAdd(counters + code, __popc(same))
                       : add_to(wanted.counts + code, __popc(same));
  }

  __syncthreads();
  for (int code = threadIdx.x; wanted.in_counters && code < codewords; code += blockDim.x) {
    if (counters[code] != 0) add_to(wanted.counts + code, counters[code]);
  }
  add_up(error, wanted.error);
}

}  // namespace
}  // namespace uefl::cuda
