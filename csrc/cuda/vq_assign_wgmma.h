// The first pass of vq_assign on sm_90a: one block on each multiprocessor for the whole pass. Not run on a GPU yet; run on the CPU,
// barriers, copies and shared-memory layouts and all, in the tests.
//
//   two warpgroups take 64 rows each, make float16 operands of them, multiply, and keep the two least scores in registers
//   a warp for each of them copies its rows of x, as they are, into a ring of stages of 16 rows
//   a warp copies the codebook, in blocks of 128 codewords x 64 elements: once where it fits, in a ring where it does not
//
// While one warpgroup compares, the other one multiplies. Bulk copies of one dimension do it all: the codebook is packed as the products
// read it, and rows are converted anyway. So there is no tensor map to encode, hand over and keep right under graph capture.
#pragma once

#include <algorithm>

#include "cuda/hopper.h"
#include "cuda/vq_assign_halves.h"

namespace uefl::cuda {
namespace {

constexpr int kWarpgroups = 2, kGroupThreads = 128, kGroupRows = 64, kStageRows = 16;
constexpr int kWgmmaThreads = kWarpgroups * (kGroupThreads + kWarp) + kWarp;
constexpr int kWgmmaColumns = kBlockCodes / 4, kBlockBytes = kBlockHalves * 2;

// How shared memory is divided. In it: the stages of the codebook, the operands of the warpgroups, stages of rows, lengths, barriers.
struct Stages {
  int codes = 0, rows = 0;   // stages of the codebook; of the rows of each warpgroup
  bool resident = false;     // every block of the codebook has a stage of its own
  int row_bytes = 0;         // a row of x
  bool dense = false;        // rows lie side by side, without gaps
  int chunks = 0, size = 0;  // blocks of 64 elements in a row; bytes of shared memory

  UEFL_HOST_DEVICE int operand_bytes() const { return chunks * kGroupRows * kBlockElements * 2; }
};

// For rows of x that are copied 16 bytes at a time, with so many bytes of shared memory; rows = 0 where that does not do.
inline Stages divide(const Shape& shape, int64_t codewords, int64_t element_bytes, int64_t limit) {
  Stages stages;
  stages.chunks = static_cast<int>((shape.d + kBlockElements - 1) / kBlockElements);
  const int64_t blocks = shape.books * (codewords / kBlockCodes) * stages.chunks, barriers = 2 * sizeof(Barrier);
  const int64_t fixed = 1024 + kWarpgroups * (stages.operand_bytes() + kGroupRows * sizeof(float));  // 1024: to align
  const int64_t rows_stage = kWarpgroups * (kStageRows * shape.d * element_bytes + barriers), codes_stage = kBlockBytes + barriers;
  // A block multiplies for some 500 cycles, about what the next one takes to come: four in flight, and then a second stage of rows.
  for (int rows = 2; rows > 0 && stages.rows == 0; --rows) {
    const int64_t codes = std::min(blocks, (limit - fixed - rows * rows_stage) / codes_stage);
    if (codes < std::min<int64_t>(blocks, 2 * rows)) continue;
    const int64_t left = limit - fixed - rows * rows_stage - codes * codes_stage;
    stages.codes = static_cast<int>(codes);
    stages.rows = static_cast<int>(std::min<int64_t>(16, rows + left / rows_stage));
    stages.resident = codes == blocks;
    stages.row_bytes = static_cast<int>(shape.d * element_bytes);
    const bool one = shape.outputs / shape.segments <= shape.inner;  // no outer stride to take
    stages.dense = shape.books == 1 && shape.inner_stride == shape.segments * shape.d &&
                   (one || shape.outer_stride == shape.inner * shape.inner_stride);
    stages.size = static_cast<int>(fixed + stages.rows * rows_stage + codes * codes_stage);
  }
  return stages;
}

// Where rows can be copied in bulk: elements side by side, rows at multiples of 16 bytes.
inline bool rows_in_bulk(const Shape& shape, const void* x, int64_t element_bytes) {
  const auto whole = [&](int64_t elements) { return elements * element_bytes % 16 == 0; };
  return shape.stride == 1 && whole(shape.d) && whole(shape.inner_stride) && whole(shape.outer_stride) &&
         reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

struct Memory {
  uint16_t* codes;
  unsigned char* rows;
  float* norms;
  Barrier *codes_full, *codes_empty, *rows_full, *rows_empty;
  uint16_t* operands;

  __device__ explicit Memory(const Stages& stages) {
    unsigned char* next = dynamic_memory() + (1024 - shared_address(dynamic_memory()) % 1024) % 1024;
    const auto take = [&](int64_t bytes) { return next += bytes, next - bytes; };
    codes = reinterpret_cast<uint16_t*>(take(stages.codes * int64_t{kBlockBytes}));
    operands = reinterpret_cast<uint16_t*>(take(kWarpgroups * stages.operand_bytes()));
    rows = take(kWarpgroups * stages.rows * int64_t{kStageRows} * stages.row_bytes);
    norms = reinterpret_cast<float*>(take(kWarpgroups * kGroupRows * sizeof(float)));
    codes_full = reinterpret_cast<Barrier*>(take(2 * stages.codes * sizeof(Barrier)));
    codes_empty = codes_full + stages.codes;
    rows_full = reinterpret_cast<Barrier*>(take(2 * kWarpgroups * stages.rows * sizeof(Barrier)));
    rows_empty = rows_full + kWarpgroups * stages.rows;
  }

  __device__ unsigned char* stage(const Stages& stages, int place) const { return rows + place * int64_t{kStageRows} * stages.row_bytes; }
};

// A place in a ring, and the parity of its phase.
struct Ring {
  int stages, place = 0;
  unsigned parity = 0;

  __device__ void advance(int by) {
    for (place += by; place >= stages; place -= stages) parity ^= 1;
  }
};

// The work of a block: tiles of 2 x 64 rows of one book each.
struct Tiles {
  int64_t count, number;

  UEFL_HOST_DEVICE explicit Tiles(const Shape& shape)
      : count(shape.outputs / shape.books), number((count + kWarpgroups * kGroupRows - 1) / (kWarpgroups * kGroupRows) * shape.books) {}
  __device__ int64_t first_row(const Shape& shape, int64_t tile, int group) const {
    return tile / shape.books * (kWarpgroups * kGroupRows) + group * kGroupRows;
  }
  // Of a stage that begins with this row.
  __device__ int rows(int64_t first) const {
    return static_cast<int>(count - first < 0 ? 0 : count - first < kStageRows ? count - first : kStageRows);
  }
};

__device__ inline void feed_codes(const Shape& shape, const PackedHalves& halves, const Stages& stages, const Memory& memory) {
  const int64_t blocks = halves.padded_k / kBlockCodes * stages.chunks;  // of a book
  const auto feed = [&](int64_t block, int place) {
    barrier_arrive_expecting(&memory.codes_full[place], kBlockBytes);
    copy_bulk(memory.codes + place * kBlockHalves, halves.codes + block * kBlockHalves, kBlockBytes, &memory.codes_full[place]);
  };
  if (stages.resident) {
    for (int block = 0; block < stages.codes; ++block) feed(block, block);
    for (int block = 0; block < stages.codes; ++block) barrier_wait(&memory.codes_full[block], 0);  // not to leave before the copies have
    return;
  }
  Ring ring{stages.codes};
  for (int64_t tile = blockIdx.x; tile < Tiles(shape).number; tile += gridDim.x) {
    for (int64_t block = 0; block < blocks; ++block) {
      barrier_wait(&memory.codes_empty[ring.place], ring.parity ^ 1);
      feed(tile % shape.books * blocks + block, ring.place);
      ring.advance(1);
    }
  }
}

template <class T>
__device__ void feed_rows(const T* x, int group, const Shape& shape, const Stages& stages, const Memory& memory) {
  const Tiles tiles(shape);
  const int lane = threadIdx.x % kWarp;
  Ring ring{stages.rows};
  for (int64_t tile = blockIdx.x; tile < tiles.number; tile += gridDim.x) {
    for (int start = 0; start < kGroupRows; start += kStageRows, ring.advance(1)) {
      const int64_t first = tiles.first_row(shape, tile, group) + start, book = tile % shape.books;
      const int rows = tiles.rows(first), place = group * stages.rows + ring.place;
      unsigned char* stage = memory.stage(stages, place);
      Barrier* full = &memory.rows_full[place];
      barrier_wait(&memory.rows_empty[place], ring.parity ^ 1);
      if (lane == 0) barrier_arrive_expecting(full, rows * stages.row_bytes);
      __syncwarp();
      if (stages.dense) {
        if (lane == 0 && rows > 0) copy_bulk(stage, x + shape.begin(first), rows * stages.row_bytes, full);
      } else if (lane < rows) {
        copy_bulk(stage + lane * stages.row_bytes, x + shape.begin((first + lane) * shape.books + book), stages.row_bytes, full);
      }
    }
  }
}

// The rows of a stage, four of them by each warp: centred, scaled to a length in [2^14, 2^15), in float16 where the products read them,
// from row start of the operand on. 16 lanes share a row.
template <class T>
__device__ void convert_rows(const unsigned char* stage, int rows, int start, const Stages& stages, const float* mean, int64_t d,
                             int code_exponent, uint16_t* operand, float* norms) {
  const int lane = threadIdx.x % kWarp, column = lane % 16 * 4;
  UEFL_UNROLL
  for (int i = 0; i < kStageRows; i += 8) {
    const int row = i + threadIdx.x / 16 % 8;
    const T* x = row < rows ? reinterpret_cast<const T*>(stage + row * stages.row_bytes) : nullptr;
    const auto elements = [&](int64_t j) {
      if (x == nullptr || j >= d) return Four<float>{};
      return less_mean(*reinterpret_cast<const Four<T>*>(x + j), *reinterpret_cast<const Four<float>*>(mean + j));
    };
    float square = 0;
    for (int64_t j = column; j < d; j += kBlockElements) square = squared(elements(j), square);
    UEFL_UNROLL
    for (int step = 8; step > 0; step /= 2) square += __shfl_xor_sync(kAllLanes, square, step);
    const float norm = row_norm(square, d, code_exponent), up = scale_up(norm);
    if (lane % 16 == 0) norms[start + row] = norm;
    for (int chunk = 0; chunk < stages.chunks; ++chunk) {
      const Four<float> y = elements(chunk * kBlockElements + column);
      Four<uint16_t> bits;
      UEFL_UNROLL
      for (int k = 0; k < 4; ++k) bits.of[k] = to_half(y.of[k] * up);
      *reinterpret_cast<Four<uint16_t>*>(operand + chunk * kGroupRows * kBlockElements + swizzled(start + row, column)) = bits;
    }
  }
}

template <class T>
__device__ void assign_rows(const T* x, const Shape& shape, const Packed& packed, const PackedHalves& halves, const Stages& stages,
                            const Memory& memory, bool exact, int64_t* indices, const Tail& tail) {
  const Tiles tiles(shape);
  const int group = threadIdx.x / kGroupThreads, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int own_row = threadIdx.x / kWarp % 4 * 16 + g;  // and 8 below it
  const int code_tiles = static_cast<int>(halves.padded_k / kBlockCodes);
  uint16_t* operand_rows = memory.operands + group * stages.operand_bytes() / 2;
  float* norms_of_rows = memory.norms + group * kGroupRows;
  Ring codes{stages.codes}, rows{stages.rows};
  const auto release = [&](int place) {
    if (!stages.resident && lane == 0) barrier_arrive(&memory.codes_empty[place]);
  };

  for (int64_t tile = blockIdx.x; tile < tiles.number; tile += gridDim.x) {
    const int64_t book = tile % shape.books, first = tiles.first_row(shape, tile, group);
    const int code_exponent = book_exponent(packed, book);
    if (stages.resident) codes.place = static_cast<int>(book) * code_tiles * stages.chunks;

    for (int start = 0; start < kGroupRows; start += kStageRows, rows.advance(1)) {
      const int place = group * stages.rows + rows.place;
      barrier_wait(&memory.rows_full[place], rows.parity);
      convert_rows<T>(memory.stage(stages, place), tiles.rows(first + start), start, stages, packed.mean + book * shape.d, shape.d,
                      code_exponent, operand_rows, norms_of_rows);
      __syncwarp();
      if (lane == 0) barrier_arrive(&memory.rows_empty[place]);
    }
    show_stores();
    group_sync(1 + group);

    float norms[2], down[2];
    UEFL_UNROLL
    for (int r = 0; r < 2; ++r) {
      norms[r] = norms_of_rows[own_row + 8 * r];
      down[r] = scale_down(norms[r], code_exponent);
    }
    PackedTopTwo top[2];
    for (int code_tile = 0; code_tile < code_tiles; ++code_tile) {
      float dot[64];
      int place = 0;
      for (int chunk = 0; chunk < stages.chunks; ++chunk) {
        const int previous = place;
        place = codes.place;
        barrier_wait(&memory.codes_full[place], stages.resident ? 0 : codes.parity);
        products_begin();
        UEFL_UNROLL
        for (int step = 0; step < kBlockElements / 16; ++step) {
          multiply_group(dot, operand(operand_rows + chunk * kGroupRows * kBlockElements, step),
                         operand(memory.codes + place * kBlockHalves, step), chunk + step > 0);
        }
        products_commit();
        if (chunk > 0) {
          products_wait<1>();
          release(previous);
        }
        codes.advance(1);
      }
      // While the products run.
      const float* half_norm = halves.half_norms + book * halves.padded_k + code_tile * int64_t{kBlockCodes} + 2 * t;
      float half_norms[kWgmmaColumns];
      UEFL_UNROLL
      for (int i = 0; i < kWgmmaColumns; ++i) half_norms[i] = half_norm[i / 2 * 8 + i % 2];
      products_wait<0>();
      release(place);
      float best[2] = {INFINITY, INFINITY}, second[2] = {INFINITY, INFINITY};
      UEFL_UNROLL
      for (int i = 0; i < kWgmmaColumns; ++i) {
        UEFL_UNROLL
        for (int r = 0; r < 2; ++r) {
          keep_two<kWgmmaColumns>(fmaf(-dot[i / 2 * 4 + r * 2 + i % 2], down[r], half_norms[i]), i, best[r], second[r]);
        }
      }
      UEFL_UNROLL
      for (int r = 0; r < 2; ++r) top[r].add(best[r], second[r], code_tile);
    }

    TopTwo found;  // of the row that this lane answers for
    float norm = 0;
    UEFL_UNROLL
    for (int r = 0; r < 2; ++r) {
      TopTwo all = unpacked<kWgmmaColumns>(top[r]);
      merge_quad(all);
      if (t == r) found = all, norm = norms[r];
    }
    const int64_t m = first + own_row + 8 * t;
    settle<kWgmmaColumns>(found, norm, t < 2 && m < tiles.count ? m * shape.books + book : -1, book, x, shape, packed, halves, exact,
                          indices, tail);
    group_sync(1 + group);  // before operands and lengths are written again
  }
}

template <class T>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    search_wgmma(const T* x, const __grid_constant__ Shape shape, const __grid_constant__ Packed packed,
                 const __grid_constant__ PackedHalves halves, const __grid_constant__ Stages stages, bool exact, int64_t* indices,
                 const __grid_constant__ Tail tail) {
#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Memory memory(stages);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages.codes; ++i) {
      barrier_init(&memory.codes_full[i], 1);
      barrier_init(&memory.codes_empty[i], kWarpgroups * kGroupThreads / kWarp);
    }
    for (int i = 0; i < kWarpgroups * stages.rows; ++i) {
      barrier_init(&memory.rows_full[i], 1);
      barrier_init(&memory.rows_empty[i], kGroupThreads / kWarp);
    }
    barriers_are_there();
  }
  __syncthreads();
  const int warp = threadIdx.x / kWarp - kWarpgroups * kGroupThreads / kWarp;
  if (warp < 0) {
    assign_rows(x, shape, packed, halves, stages, memory, exact, indices, tail);
  } else if (warp < kWarpgroups) {
    feed_rows(x, warp, shape, stages, memory);
  } else if (threadIdx.x % kWarp == 0) {
    feed_codes(shape, halves, stages, memory);
  }
#else
  asm("trap;");  // the host launches this on sm_90 only
#endif
}

}  // namespace
}  // namespace uefl::cuda
