// vq_assign with mma.sync (sm_80 and later), for x of any type and any strides. It is a complete search of
// two phases, and the second phase also serves the search with wgmma. The tests also run it on the CPU,
// instruction by instruction.
//
// A thread block keeps 64 rows in shared memory as float16. It reads the codebook in blocks of 128 codewords
// x 64 elements, which stream through two buffers. Each of the eight warps computes 32 rows x 32 codewords of
// every product. If rows are too long for the shared memory, the kernel converts 64 of their elements again
// for each block of codewords (kStreamed).
//
//   first   keeps the best and the second-best score of a row, and writes the rows that are certain. It lists
//           the other rows with a limit: no codeword with a score above the limit can be the nearest one.
//   second  takes the rows that the thread block has listed, a few per cent. The codewords within the
//           limit, usually two or three, are candidates, and the definition decides between them. For a row
//           with too many candidates, the definition compares all codewords.
#pragma once

#include "cuda/vq_assign_definition.h"
#include "cuda/vq_assign_scores.h"

namespace uefl::cuda {
namespace {

constexpr int kMmaRows = 64, kMmaColumns = 8, kParts = kThreads / kMmaRows, kMostCandidates = 8;
constexpr int kRowBlock = kMmaRows * kBlockElements;
constexpr int kMmaLists = kMmaRows / kWarpRows;  // lists of a thread block, one for each warp that tests rows
constexpr int kMmaBarrier = 5;                   // named barrier of the threads that search with mma.sync

// The state that a thread block keeps for its rows.
struct MmaRows {
  // The first phase fills these, one entry for each of the threads or warps that share a row.
  float squares[kParts][kMmaRows], rests[kParts][kMmaRows];
  int bests[4][kMmaRows], seconds[4][kMmaRows], numbers[4][kMmaRows];
  // The second phase uses these.
  int64_t outputs[kMmaRows];
  float limits[kMmaRows];
  int rows, read;  // number of rows, and of entries read from the lists of the thread block
  int found[kMmaRows], candidates[kMmaRows][kMostCandidates];
};

UEFL_HOST_DEVICE inline int64_t mma_width(int64_t d) {
  return (d + kBlockElements - 1) / kBlockElements * kBlockElements;
}
// Bytes of shared memory: the array that the kernel declares itself, and the dynamic memory for rows of this
// length.
constexpr int64_t kMmaStaticBytes = 64;
UEFL_HOST_DEVICE inline int64_t mma_bytes(int64_t elements) {
  return (mma_width(elements) * kMmaRows + 2 * kBlockHalves) * 2 + static_cast<int64_t>(sizeof(MmaRows));
}

// The dynamic shared memory: 64 rows, two buffers for the codebook, and the state.
struct MmaMemory {
  uint16_t *rows, *buffers;  // rows: [width / 64] blocks of 64 rows
  MmaRows& known;

  __device__ explicit MmaMemory(int64_t elements)
      : rows(reinterpret_cast<uint16_t*>(dynamic_memory())),
        buffers(rows + mma_width(elements) * kMmaRows),
        known(*reinterpret_cast<MmaRows*>(buffers + 2 * kBlockHalves)) {}
};

// Returns the number of this thread among the threads that search with mma.sync: all threads of a thread
// block of search_mma, or 256 threads of search_wgmma.
__device__ inline int mma_thread() { return static_cast<int>(threadIdx.x % kThreads); }
__device__ inline void mma_barrier() { named_wait(kMmaBarrier, kThreads); }

__device__ inline void copy_block(const uint16_t* block, uint16_t* buffer) {
  for (int i = mma_thread() * 8; i < kBlockHalves; i += kThreads * 8) copy_async(buffer + i, block + i);
  commit_copies();
}

// Returns the address that this lane passes to load_matrices() for the 16 x 16 elements from (row, j) on. An
// operand of rows (of = 0) has the rows first and then the elements. An operand of codewords (of = 1) has the
// elements first.
__device__ inline const uint16_t* matrix_address(const uint16_t* block, int row, int j, int of) {
  const int lane = threadIdx.x % kWarp, first = lane / 8 % 2 * 8, second = lane / 16 * 8;
  return block + swizzled(row + lane % 8 + (of == 0 ? first : second), j + (of == 0 ? second : first));
}

// Compares the scores of a thread for one row with the limit of the row. Few scores are within the limit.
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

// The part of a row that a thread converts: every kParts'th group of four elements.
template <class T>
struct RowPart {
  const T* source;  // null if there is no row; its elements count as zero
  const Shape& shape;
  const float* center;
  RowScale scale;
  int row, part;

  // output_of(i) returns the output of row i, or a negative number if there is none. Neighboring threads read
  // adjacent elements.
  template <class OutputOf>
  __device__ RowPart(const T* x, const Shape& of, const PackedCodebook& packed, int64_t codebook,
                     const OutputOf& output_of)
      : shape(of),
        center(packed.center + codebook * of.d),
        scale(of, packed, codebook, is_half(T{})),
        row(of.stride == 1 ? mma_thread() / kParts : mma_thread() % kMmaRows),
        part(of.stride == 1 ? mma_thread() % kParts : mma_thread() / kMmaRows) {
    const int64_t output = output_of(row);
    source = output >= 0 ? x + shape.begin(output) : nullptr;
  }

  // Converts a chunk to float16. Adds up the squares of the scaled elements and of their errors.
  __device__ void convert(int chunk, uint16_t* block, float& square, float& rest) const {
    UEFL_UNROLL_BY(1)
    for (int j = part * 4; j < kBlockElements; j += kParts * 4) {
      Four<float> y = centered_four(source, shape, center, chunk * kBlockElements + j);
      UEFL_UNROLL
      for (int i = 0; i < 4; ++i) y.values[i] *= scale.up;
      square = squared(y, square);
      *reinterpret_cast<uint2*>(block + swizzled(row, j)) = halves_of(y, rest);
    }
  }

  // Converts all chunks one after the other. Streamed chunks overwrite each other, because only the sums are
  // needed.
  template <bool kStreamed>
  __device__ void convert_all(const MmaMemory& memory, float& square, float& rest) const {
    for (int chunk = 0; chunk * kBlockElements < shape.d; ++chunk)
      convert(chunk, memory.rows + (kStreamed ? 0 : chunk * kRowBlock), square, rest);
  }
};

// Scores the rows against all codewords of their codebook. The caller has started the copy of the first block
// to the first buffer. use(scores, r, part) gets the scores, above the base, of row 8 r + lane / 4 of the
// warp, for the columns of this lane among 32 codewords.
template <bool kStreamed, class T, class Use>
__device__ void score_rows(const RowPart<T>& rows, const PackedCodebook& packed, int64_t codebook,
                           const MmaMemory& memory, const Use& use) {
  const Shape& shape = rows.shape;
  const int warp = mma_thread() / kWarp, t = threadIdx.x % 4;
  const int warp_row = warp / 4 * 32, warp_code = warp % 4 * 32, width = static_cast<int>(mma_width(shape.d));
  const int chunks = width / kBlockElements,
            code_blocks = static_cast<int>(shape.padded_k / kBlockCodewords) * chunks;
  const uint16_t* codewords = packed.halves + codebook * shape.padded_k * width;
  const float* starts = start_of(packed, first_tile_of(shape, codebook), warp_code) + t * (kStarts / 4);
  float dot[2][4][4] = {};  // two times 16 rows, four times 8 codewords
  for (int number = 0; number < code_blocks; ++number) {
    const int chunk = number % chunks, code_tile = number / chunks;
    if (number + 1 < code_blocks) {
      copy_block(codewords + int64_t{number + 1} * kBlockHalves,
                 memory.buffers + (number + 1) % 2 * kBlockHalves);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    if constexpr (kStreamed) {
      float square = 0, rest = 0;
      rows.convert(chunk, memory.rows, square, rest);
    }
    mma_barrier();
    const uint16_t* row_block = memory.rows + (kStreamed ? 0 : chunk * kRowBlock);
    const uint16_t* code_block = memory.buffers + number % 2 * kBlockHalves;
    UEFL_UNROLL
    for (int j = 0; j < kBlockElements; j += 16) {
      uint32_t left[2][4], right[2][4];
      UEFL_UNROLL
      for (int i = 0; i < 2; ++i) {
        load_matrices(left[i], matrix_address(row_block, warp_row + 16 * i, j, 0));
        load_matrices(right[i], matrix_address(code_block, warp_code + 16 * i, j, 1));
      }
      UEFL_UNROLL
      for (int i = 0; i < 2; ++i) {
        UEFL_UNROLL
        for (int c = 0; c < 4; ++c)
          multiply_add(dot[i][c], left[i], right[c / 2][c % 2 * 2], right[c / 2][c % 2 * 2 + 1]);
      }
    }
    mma_barrier();  // before the next copy overwrites the buffer
    if (chunk + 1 < chunks) continue;
    const Four<float> start[2] = {load_four(starts), load_four(starts + 4)};
    starts += kStarts;
    UEFL_UNROLL
    for (int r = 0; r < 4; ++r) {
      float scores[kMmaColumns];
      UEFL_UNROLL
      for (int i = 0; i < kMmaColumns; ++i) {
        float& product = dot[r / 2][i / 2][r % 2 * 2 + i % 2];
        scores[i] = fmaf(-product, rows.scale.down, start[i / 4].values[i % 4]);
        product = 0;
      }
      use(scores, r, code_tile * 4 + warp % 4);
    }
  }
}

// Decides the rows of a thread block by the definition. A warp takes a row. It compares the candidates of the
// row, or all codewords if there are too many candidates or none.
template <class T>
__device__ void decide(const T* x, const Shape& shape, const PackedCodebook& packed, int64_t codebook,
                       const MmaRows& known, int64_t* indices) {
  const double* codewords = packed.exact + codebook * shape.k * shape.d;
  const int lane = threadIdx.x % kWarp;
  for (int row = mma_thread() / kWarp; row < known.rows; row += kThreads / kWarp) {
    const int found = known.found[row];
    const T* from = x + shape.begin(known.outputs[row]);
    const auto candidate = [&](int i) { return i < found ? known.candidates[row][i] : -1; };
    int64_t index;
    if (found < 1 || found > kMostCandidates)
      index = nearest(from, shape.stride, codewords, shape.k, shape.d, shape.euclidean);
    else if (found <= 2)
      index = nearest_of<2, 1, 2>(from, shape, codewords, candidate(lane / 16));
    else
      index = nearest_of<kMostCandidates, 1, 2>(from, shape, codewords, candidate(lane / 4));
    if (lane == 0) indices[known.outputs[row]] = index;
  }
}

// The lists of open rows of a thread block, one after the other.
struct OpenLists {
  const Listed* rows;
  const int* counts;  // in shared memory
  int lists;
  int64_t room;  // entries of a list

  __device__ OpenLists(const PackedCodebook& packed, const int* found, int number, int64_t entries)
      : rows(packed.listed + blockIdx.x * number * entries), counts(found), lists(number), room(entries) {}
  // Returns the place of an entry, or a negative number after the last one.
  __device__ int64_t place(int entry) const {
    for (int list = 0; list < lists; ++list) {
      if (entry < counts[list]) return list * room + entry;
      entry -= counts[list];
    }
    return -1;
  }

  // Reads the next rows of a codebook with one warp: 32 entries at a time, as long as there is room for all
  // of them.
  __device__ void read(const Shape& shape, int64_t codebook, MmaRows& known) const {
    const int lane = threadIdx.x % kWarp;
    int taken = 0, first = known.read;
    for (;; first += kWarp) {
      const int64_t at = place(first + lane);
      if (__all_sync(kAllLanes, at < 0)) break;
      const int64_t output = at < 0 ? -1 : rows[at].output;
      const bool mine = at >= 0 && (shape.codebooks == 1 || output % shape.codebooks == codebook);
      const unsigned votes = __ballot_sync(kAllLanes, mine);
      if (taken + __popc(votes) > kMmaRows) break;
      const int row = taken + __popc(votes & ((1u << lane) - 1));
      if (mine) known.outputs[row] = output, known.limits[row] = rows[at].limit();
      taken += __popc(votes);
    }
    __syncwarp();
    if (lane == 0) known.rows = taken, known.read = first;
  }
};

// Runs the second phase of a thread block, with kThreads threads, over the rows that the thread block has
// listed.
template <bool kStreamed, class T>
__device__ void search_open(const T* x, const Shape& shape, const PackedCodebook& packed,
                            const OpenLists& lists, int64_t* indices) {
  const MmaMemory memory(kStreamed ? kBlockElements : shape.d);
  MmaRows& known = memory.known;
  const int thread = mma_thread(), warp_row = thread / kWarp / 4 * 32, g = thread % kWarp / 4;
  for (int64_t codebook = 0; codebook < shape.codebooks; ++codebook) {
    if (thread == 0) known.read = 0;
    while (true) {
      mma_barrier();
      if (thread < kWarp) lists.read(shape, codebook, known);
      mma_barrier();
      if (known.rows == 0) break;
      if (thread < kMmaRows) known.found[thread] = 0;
      copy_block(packed.halves + codebook * shape.padded_k * mma_width(shape.d), memory.buffers);
      const RowPart<T> rows(x, shape, packed, codebook,
                            [&](int row) { return row < known.rows ? known.outputs[row] : -1; });
      float square = 0, rest = 0;
      if (!kStreamed) rows.template convert_all<kStreamed>(memory, square, rest);
      float limit[4];
      UEFL_UNROLL
      for (int r = 0; r < 4; ++r) {
        const int row = warp_row + 8 * r + g;
        limit[r] = row < known.rows ? known.limits[row] : NAN;
      }
      score_rows<kStreamed>(rows, packed, codebook, memory,
                            [&](const float (&scores)[kMmaColumns], int r, int part) {
                              note_candidates(scores, part * int64_t{4 * kMmaColumns} + 2 * (threadIdx.x % 4),
                                              warp_row + 8 * r + g, limit[r], known);
                            });
      mma_barrier();
      decide(x, shape, packed, codebook, known, indices);
    }
  }
}

// Returns the number of tiles of search_mma.
UEFL_HOST_DEVICE inline int64_t mma_tiles(const Shape& shape) {
  return (shape.outputs / shape.codebooks + kMmaRows - 1) / kMmaRows * shape.codebooks;
}
UEFL_HOST_DEVICE inline int64_t mma_room(const Shape& shape, unsigned blocks) {
  return (mma_tiles(shape) + blocks - 1) / blocks * kWarpRows;
}

// Adds the scores of this thread for a row to `top`: all of them (kCross), or the least of every four.
template <bool kCross>
__device__ inline void compare(const float (&scores)[kMmaColumns], int part, int shift, TileTopTwo& top) {
  if constexpr (kCross) {
    int all[kMmaColumns];
    UEFL_UNROLL
    for (int i = 0; i < kMmaColumns; ++i) all[i] = pack(scores[i], i, shift);
    top.add(all, part);
  } else {
    top.add({pack(least_of_four(scores), 0, shift), pack(least_of_four(scores + 4), 4, shift)}, part);
  }
}

// Stores the results of a warp for its rows. The warps that test rows read them.
__device__ inline void store_results(const TileTopTwo (&top)[4], MmaRows& known) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  UEFL_UNROLL
  for (int r = 0; r < 4; ++r) {
    const TopTwo of_warp = merge_quad<kMmaColumns>(top[r]);
    const int which = warp / 4 * 32 + 8 * r + lane / 4;
    if (lane % 4 != r) continue;
    known.bests[warp % 4][which] = of_warp.best, known.seconds[warp % 4][which] = of_warp.second;
    known.numbers[warp % 4][which] = of_warp.index;
  }
}

// Returns the best and the second-best score of row `which`. Unless all scores were compared, the warp scores
// four codewords of each of its 16 rows again.
template <bool kCross>
__device__ TopTwo top_two(const Shape& shape, const PackedCodebook& packed, int64_t codebook, float down,
                          const MmaMemory& memory, int which) {
  TopTwo found{INT_MAX, INT_MAX, 0};
  for (int i = 0; i < 4; ++i) {
    found.merge(memory.known.bests[i][which], memory.known.seconds[i][which], memory.known.numbers[i][which]);
  }
  if constexpr (!kCross) {
    const int first_tile = first_tile_of(shape, codebook), warp = threadIdx.x / kWarp,
              chunks = static_cast<int>(mma_width(shape.d)) / kBlockElements;
    GroupScores scores(found.index, static_cast<int>(threadIdx.x % kWarp));
    for (int chunk = 0; chunk < chunks; ++chunk) {
      scores.add(memory.rows + (chunk * kMmaRows + warp * kWarpRows) * kBlockElements, [&](int block) {
        return packed.halves + int64_t{(first_tile + block) * chunks + chunk} * kBlockHalves;
      });
    }
    const float* start = start_of(packed, first_tile, scores.code());
    const TopTwo four = scores.result({start[0], start[1]}, down, packed.shift);
    found = {four.best, lesser(found.second, four.second), four.index};
  }
  return found;
}

// kCross: compares all scores. Otherwise the kernel compares the least of every four scores, as in
// vq_assign_wgmma.h.
template <class T, bool kCross, bool kStreamed>
__global__ void __launch_bounds__(kThreads, 2)
    search_mma(const T* x, const __grid_constant__ Shape shape, const __grid_constant__ PackedCodebook packed,
               bool exact, int64_t* indices) {
  static_assert(kCross || !kStreamed, "scoring four codewords again needs whole rows");
  __shared__ int open[kMmaLists];
  const MmaMemory memory(kStreamed ? kBlockElements : shape.d);
  MmaRows& known = memory.known;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t all = shape.outputs / shape.codebooks, room = mma_room(shape, gridDim.x);
  // The list of a warp that tests rows.
  OpenRows list(packed, static_cast<int>(blockIdx.x) * kMmaLists + warp % kMmaLists, room);

  const auto tiles = static_cast<unsigned>(mma_tiles(shape)),
             codebooks = static_cast<unsigned>(shape.codebooks);
  for (unsigned work = blockIdx.x; work < tiles; work += gridDim.x) {
    const int64_t codebook = work % codebooks, first_row = int64_t{work / codebooks} * kMmaRows;
    const auto output_of = [&](int row) {
      return first_row + row < all ? (first_row + row) * shape.codebooks + codebook : -1;
    };
    copy_block(packed.halves + codebook * shape.padded_k * mma_width(shape.d), memory.buffers);
    const RowPart<T> rows(x, shape, packed, codebook, output_of);
    float square = 0, rest = 0;
    rows.template convert_all<kStreamed>(memory, square, rest);
    known.squares[rows.part][rows.row] = square, known.rests[rows.part][rows.row] = rest;
    TileTopTwo top[4];
    score_rows<kStreamed>(rows, packed, codebook, memory,
                          [&](const float (&scores)[kMmaColumns], int r, int part) {
                            compare<kCross>(scores, part, packed.shift, top[r]);
                          });
    store_results(top, known);
    __syncthreads();
    if (warp < kMmaLists) {
      const RowScale& scale = rows.scale;
      const int which = warp * kWarpRows + row_of(lane);
      const TopTwo found = top_two<kCross>(shape, packed, codebook, scale.down, memory, which);
      float square = 0, rest = 0;
      for (int i = 0; i < kParts; ++i) square += known.squares[i][which], rest += known.rests[i][which];
      const RowBounds bounds(shape, packed, codebook, scale.down);
      const RowCertificate proof(scale.norm(square, shape.d), scale.rest(rest, shape.d), bounds);
      const int64_t output = lane % 2 == 0 ? output_of(which) : -1;
      const bool certain = proof.holds() && (!exact || proof.apart(found.best, found.second));
      if (output >= 0 && certain) indices[output] = found.index;
      list.push(output >= 0 && !certain, output, proof.limit(found.best, bounds.base));
    }
    __syncthreads();
  }
  if (warp < kMmaLists && lane == 0) open[warp] = list.count;
  search_open<kStreamed>(x, shape, packed, OpenLists(packed, open, kMmaLists, room), indices);
}

}  // namespace
}  // namespace uefl::cuda
