// The first pass of vq_assign on sm_90a: one block on each multiprocessor for the whole pass. The tests also run it on the CPU,
// barriers, copies and shared-memory layouts and all.
//
//   two or three warpgroups take 64 rows each: every warp makes float16 fragments of its own 16 rows, in registers; products with 128
//   codewords at a time; the two least scores in registers
//   a warp for each of them copies its rows of x, as they are, into a ring of stages of 16 rows
//   a warp copies the codebook, in blocks of 128 codewords x 64 elements: once where it fits, in a ring where it does not
//
// While some warpgroups compare, the others multiply. Bulk copies of one dimension do it all: the codebook is packed as the products read
// it, and rows are converted anyway. So there is no tensor map to encode, hand over and keep right under graph capture.
#pragma once

#include "cuda/vq_assign_wgmma_plan.h"

namespace uefl::cuda {
namespace {

struct Memory {
  const Stages& stages;

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(dynamic_memory() + offset);
  }
  __device__ uint16_t* codes(int place) const { return at<uint16_t>(place * kBlockBytes); }
  __device__ float* starts(int place) const { return at<float>(stages.starts_at + place * kStartBytes); }
  __device__ Barrier* codes_full(int place) const { return at<Barrier>(stages.codes_ready_at) + place; }
  __device__ Barrier* codes_empty(int place) const { return codes_full(stages.codes + place); }
  // The stages of the warpgroups one after another.
  __device__ unsigned char* rows(int place) const { return at<unsigned char>(stages.rows_at + place * kStageRows * stages.row_bytes); }
  __device__ Barrier* rows_full(int place) const { return at<Barrier>(stages.rows_ready_at) + place; }
  __device__ Barrier* rows_empty(int place) const { return rows_full(stages.groups * stages.rows + place); }
};

// A place in a ring, and the parity of its phase.
struct Ring {
  int stages, place = 0;
  unsigned parity = 0;

  __device__ void advance(int by) {
    for (place += by; place >= stages; place -= stages) parity ^= 1;
  }
};

// The work of a block: tiles of rows of one book each, 64 for each warpgroup.
struct Tiles {
  int64_t count, number;
  int rows_of_tile;

  UEFL_HOST_DEVICE Tiles(const Shape& shape, int groups)
      : count(shape.outputs / shape.books),
        number((count + groups * kGroupRows - 1) / (groups * kGroupRows) * shape.books),
        rows_of_tile(groups * kGroupRows) {}
  // A 64-bit division takes a hundred instructions, which most calls can do without.
  __device__ int64_t book(const Shape& shape, int64_t tile) const { return shape.books == 1 ? 0 : tile % shape.books; }
  __device__ int64_t first_row(const Shape& shape, int64_t tile, int group) const {
    return (shape.books == 1 ? tile : tile / shape.books) * rows_of_tile + group * kGroupRows;
  }
  // Of a stage that begins with this row.
  __device__ int rows(int64_t first) const {
    return static_cast<int>(count - first < 0 ? 0 : count - first < kStageRows ? count - first : kStageRows);
  }
};

__device__ inline void feed_codes(const Shape& shape, const Packed& packed, const Stages& stages, const Memory& memory) {
  const int64_t blocks = shape.padded_k / kBlockCodes * stages.chunks;  // of a book
  const auto feed = [&](int64_t block, int place) {
    Barrier* full = memory.codes_full(place);
    barrier_arrive_expecting(full, kBlockBytes + kStartBytes);
    copy_bulk(memory.codes(place), packed.halves + block * kBlockHalves, kBlockBytes, full);
    copy_bulk(memory.starts(place), packed.starts + block / stages.chunks * kStarts, kStartBytes, full);
  };
  if (stages.resident) {
    for (int block = 0; block < stages.codes; ++block) feed(block, block);
    for (int block = 0; block < stages.codes; ++block) barrier_wait(memory.codes_full(block), 0);  // not to leave before the copies have
    return;
  }
  Ring ring{stages.codes};
  for (int64_t tile = blockIdx.x; tile < Tiles(shape, stages.groups).number; tile += gridDim.x) {
    for (int64_t block = 0; block < blocks; ++block) {
      barrier_wait(memory.codes_empty(ring.place), ring.parity ^ 1);
      feed(tile % shape.books * blocks + block, ring.place);
      ring.advance(1);
    }
  }
}

// Of every second warpgroup.
template <class T>
__device__ void feed_rows(const T* x, int first_group, const Shape& shape, const Stages& stages, const Memory& memory) {
  const Tiles tiles(shape, stages.groups);
  const int lane = threadIdx.x % kWarp;
  Ring ring{stages.rows};
  for (int64_t tile = blockIdx.x; tile < tiles.number; tile += gridDim.x) {
    for (int start = 0; start < kGroupRows; start += kStageRows, ring.advance(1)) {
      for (int group = first_group; group < stages.groups; group += 2) {
        const int64_t first = tiles.first_row(shape, tile, group) + start, book = tiles.book(shape, tile);
        const int rows = tiles.rows(first), place = group * stages.rows + ring.place;
        unsigned char* stage = memory.rows(place);
        Barrier* full = memory.rows_full(place);
        barrier_wait(memory.rows_empty(place), ring.parity ^ 1);
        __syncwarp();  // a stage of no rows may come back at once: to a lane that still waits, that phase looks like the one before it
        if (lane == 0) barrier_arrive_expecting(full, rows * stages.row_bytes);
        __syncwarp();
        if (stages.dense) {
          if (lane == 0 && rows > 0) copy_bulk(stage, x + first * shape.d, rows * stages.row_bytes, full);
        } else if (lane < rows) {
          copy_bulk(stage + lane * stages.row_bytes, x + shape.begin((first + lane) * shape.books + book), stages.row_bytes, full);
        }
      }
    }
  }
}

// What a thread knows of rows g and g + 8 of its warp.
struct RowPair {
  float norm[2], rest[2], down[2];
};

// The 16 rows of a stage: centred, scaled to a length in [2^14, 2^15), in float16 fragments, which each thread keeps; those of rows that
// have more than one chunk in shared memory.
template <class T, bool kLong>
__device__ RowPair convert_rows(const unsigned char* stage, int rows, const Stages& stages, const float* centre, int64_t d,
                                int code_exponent, uint32_t (&fragment)[4][4], uint4* fragments) {
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  const auto elements = [&](int r, int64_t j) {
    if (g + 8 * r >= rows || j >= d) return Four<float>{};
    return less_centre(load_four(reinterpret_cast<const T*>(stage + (g + 8 * r) * stages.row_bytes) + j), load_four(centre + j));
  };
  RowPair pair{};
  const int chunks = kLong ? stages.chunks : 1;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    UEFL_UNROLL
    for (int step = 0; step < 4; ++step) {
      UEFL_UNROLL
      for (int r = 0; r < 2; ++r) pair.norm[r] = squared(elements(r, chunk * kBlockElements + 16 * step + 4 * t), pair.norm[r]);
    }
  }
  float up[2];
  UEFL_UNROLL
  for (int r = 0; r < 2; ++r) {
    pair.norm[r] += __shfl_xor_sync(kAllLanes, pair.norm[r], 1);
    pair.norm[r] += __shfl_xor_sync(kAllLanes, pair.norm[r], 2);
    pair.norm[r] = row_norm(pair.norm[r], d, code_exponent);
    up[r] = scale_up(pair.norm[r]), pair.down[r] = scale_down(pair.norm[r], code_exponent);
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    UEFL_UNROLL
    for (int step = 0; step < 4; ++step) {
      UEFL_UNROLL
      for (int r = 0; r < 2; ++r) {
        halves_of(elements(r, chunk * kBlockElements + 16 * step + 4 * t), up[r], fragment[step][r], fragment[step][2 + r], pair.rest[r]);
      }
      if (!kLong) continue;
      fragments[(chunk * 4 + step) * kGroupThreads] = {fragment[step][0], fragment[step][1], fragment[step][2], fragment[step][3]};
    }
  }
  UEFL_UNROLL
  for (int r = 0; r < 2; ++r) {
    pair.rest[r] += __shfl_xor_sync(kAllLanes, pair.rest[r], 1);
    pair.rest[r] += __shfl_xor_sync(kAllLanes, pair.rest[r], 2);
    pair.rest[r] = row_rest(pair.rest[r], pair.norm[r]);
  }
  return pair;
}

// The scores of two rows and 128 codewords, of which the two least are kept.
__device__ inline void compare(const float (&dot)[64], const float* starts, const float (&down)[2], int shift, int tile,
                               PackedTopTwo (&top)[2]) {
  const float* own = starts + threadIdx.x % 4 * (kStarts / 4);
  TwoLeast found[2];
  UEFL_UNROLL
  for (int i = 0; i < kWgmmaColumns; i += kGroupColumns) {
    int packed[2][kGroupColumns];
    UEFL_UNROLL
    for (int c = i; c < i + kGroupColumns; c += 4) {
      const Four<float> start = load_four(own + c);
      UEFL_UNROLL
      for (int e = 0; e < 4; ++e) {
        UEFL_UNROLL
        for (int r = 0; r < 2; ++r) {
          packed[r][c - i + e] = pack(fmaf(-dot[2 * (c + e) - e % 2 + 2 * r], down[r], start.of[e]), c + e, shift);
        }
      }
    }
    UEFL_UNROLL
    for (int r = 0; r < 2; ++r) found[r].add(two_least(packed[r]));
  }
  UEFL_UNROLL
  for (int r = 0; r < 2; ++r) top[r].add(found[r], tile);
}

// What the rows of a book are judged by: float64 until here, so it is made once for a book.
struct Judge {
  Certificate certificate;
  Base base;
  float longest;
  int code_exponent;

  Judge() = default;
  __device__ Judge(const Shape& shape, const Packed& packed, int64_t book)
      : certificate(shape, packed, book),
        base(base_of(packed, book)),
        longest(longest_row(packed, book)),
        code_exponent(book_exponent(packed, book)) {}
};

// kLong: rows of more than one chunk.
template <class T, bool kLong>
__device__ void assign_rows(const Shape& shape, const Packed& packed, const Stages& stages, const Memory& memory, bool exact,
                            int64_t* indices) {
  const Tiles tiles(shape, stages.groups);
  const int group = threadIdx.x / kGroupThreads, warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int code_tiles = static_cast<int>(shape.padded_k / kBlockCodes);
  uint4* fragments = memory.at<uint4>(stages.fragments_at + group * stages.fragment_bytes) + threadIdx.x % kGroupThreads;
  const int own_list = (group * kGroupLists + warp) * OpenRows::kRoom;
  OpenRows list{memory.at<int64_t>(stages.outputs_at) + own_list, memory.at<float>(stages.limits_at) + own_list};
  const int chunks = kLong ? stages.chunks : 1;
  bool arrived = false;  // all of a resident codebook
  Judge judge;
  Ring codes{stages.codes}, rows{stages.rows};
  if (stages.of_one_warp()) rows.advance(warp);
  const auto release = [&](int place) {
    if (stages.resident) return;
    __syncwarp();  // all lanes have read it
    if (lane == 0) barrier_arrive(memory.codes_empty(place));
  };

  for (int64_t tile = blockIdx.x; tile < tiles.number; tile += gridDim.x) {
    const int64_t book = tiles.book(shape, tile), first = tiles.first_row(shape, tile, group) + warp * kStageRows;
    if (tile == blockIdx.x || shape.books > 1) judge = Judge(shape, packed, book);
    if (stages.resident) codes.place = static_cast<int>(book) * code_tiles * chunks, codes.parity = 0;

    RowPair pair{};
    uint32_t fragment[4][4];
    const bool own_stages = stages.of_one_warp();
    for (int stage = own_stages ? warp : 0; stage < 4; stage += own_stages ? 4 : 1, rows.advance(own_stages ? 4 : 1)) {
      const int place = group * stages.rows + rows.place;
      barrier_wait(memory.rows_full(place), rows.parity);
      if (stage == warp) {
        pair = convert_rows<T, kLong>(memory.rows(place), tiles.rows(first), stages, packed.centre + book * shape.d, shape.d,
                                      judge.code_exponent, fragment, fragments);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.rows_empty(place));
    }

    PackedTopTwo top[2];
    float dot[64];
    for (int code_tile = 0; code_tile < code_tiles; ++code_tile) {
      int place = codes.place;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        if (kLong) {
          UEFL_UNROLL
          for (int i = 0; i < 4; ++i) {
            const uint4 of = fragments[(chunk * 4 + i) * kGroupThreads];
            fragment[i][0] = of.x, fragment[i][1] = of.y, fragment[i][2] = of.z, fragment[i][3] = of.w;
          }
          if (chunk > 0) release(place);
          place = codes.place;
        }
        if (!arrived) barrier_wait(memory.codes_full(place), codes.parity);
        const uint64_t right = operand(memory.codes(place));
        registers_settled(dot);
        products_begin();
        UEFL_UNROLL
        for (int i = 0; i < 4; ++i) multiply_group(dot, fragment[i], right + i * kOperandStep, kLong ? chunk + i > 0 : i > 0);
        products_commit();
        codes.advance(1);
        products_wait<0>();
        registers_settled(dot);
      }
      compare(dot, memory.starts(place), pair.down, packed.shift, code_tile, top);
      release(place);
    }
    arrived = stages.resident && shape.books == 1;

    // The row that this lane answers for: g or g + 8.
    TopTwo found{};
    UEFL_UNROLL
    for (int r = 0; r < 2; ++r) {
      const TopTwo all = merge_quad<kWgmmaColumns>(top[r]);
      if (t == r) found = all;
    }
    const int64_t m = first + t % 2 * 8 + g, output = m * shape.books + book;
    const bool there = t < 2 && m < tiles.count;
    const float norm = t == 0 ? pair.norm[0] : pair.norm[1], rest = t == 0 ? pair.rest[0] : pair.rest[1];
    float limit;
    const bool reached = norm <= judge.longest;
    const bool certain = is_certain(found, norm, rest, judge.certificate, judge.base, exact, limit) && reached;
    if (!reached) limit = NAN;
    if (there && certain) indices[output] = found.index;
    list.push(there && !certain, output, limit, packed, book, shape);
    if (shape.books > 1) list.flush(packed, book, shape);
  }
  if (shape.books == 1) list.flush(packed, 0, shape);
}

template <class T, int kGroups, bool kLong>
__global__ void __launch_bounds__(Layout<kGroups>::kThreads, 1)
    search_wgmma(const T* x, const __grid_constant__ Shape shape, const __grid_constant__ Packed packed,
                 const __grid_constant__ Stages stages, bool exact, int64_t* indices) {
#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Memory memory{stages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages.codes; ++i) {
      barrier_init(memory.codes_full(i), 1);
      barrier_init(memory.codes_empty(i), kGroups * kGroupThreads / kWarp);
    }
    for (int i = 0; i < kGroups * stages.rows; ++i) {
      barrier_init(memory.rows_full(i), 1);
      barrier_init(memory.rows_empty(i), stages.of_one_warp() ? 1 : 4);
    }
    barriers_are_there();
  }
  __syncthreads();
  const int copier = threadIdx.x / kWarp - kGroups * kGroupThreads / kWarp;
  if (copier < 0) {
    more_registers<Layout<kGroups>::kCompute>();
    assign_rows<T, kLong>(shape, packed, stages, memory, exact, indices);
  } else {
    fewer_registers<Layout<kGroups>::kCopy>();
    if (copier < 2) {
      feed_rows(x, copier, shape, stages, memory);
    } else if (copier == 2 && threadIdx.x % kWarp == 0) {
      feed_codes(shape, packed, stages, memory);
    }
  }
#else
  asm("trap;");  // the host launches this on sm_90 only
#endif
}

}  // namespace
}  // namespace uefl::cuda
