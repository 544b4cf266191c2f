// The first role of search_wgmma reads the rows of x, and converts them to float16 tiles.
//
// A warp takes 16 rows. Lane 8 g + p takes piece p of four of them: 16 bytes of a tile, which are eight
// elements. A lane copies its pieces of the next chunks to a ring in shared memory, and only this lane reads
// them. So no barrier is needed, and the copies that are under way take no registers.
#pragma once

#include "cuda/vq_assign_wgmma_finish.h"

namespace uefl::cuda {
namespace {

constexpr int kRowsOfLane = 4;

// Returns the first of the four rows of a lane. Half a warp writes 8 bytes of float32 rows at once: rows r
// and r + 4, which use different banks because of the swizzle.
__device__ inline int first_row_of(int lane) { return lane / 8 % 2 * 4 + lane / 16; }
// Returns how far another row of the lane is from the first one.
__device__ constexpr int row_after(int i) { return i % 2 * 2 + i / 2 * 8; }

// Where the elements that a lane takes of each row and chunk are in x and in the ring: 16 bytes, or two parts
// of 16 bytes if the elements are float32.
template <class T>
struct ChunkLayout {
  static constexpr int kParts = sizeof(T) / 2, kElements = 8 / kParts;
  static constexpr int kBytes = kRowsOfLane * kParts * kWarp * 16;  // of a chunk, for all lanes of a warp

  // Returns the element of a chunk at which a part begins.
  __device__ static int column(int lane, int part) { return part * 32 + lane % 8 * kElements; }
  // Returns where a part of row i is in the ring, from the first part of the lane on.
  __device__ static constexpr int place(int i, int part) { return (i * kParts + part) * kWarp * 16; }
};

// Copies the rows of a thread block in the order of its items, chunk by chunk.
template <class T, bool kLong>
struct RowCopies {
  const T* x;
  const Shape& shape;
  const WgmmaPlan& plan;
  int lane, warp_row, step, items, item, chunk = 0, place = 0;
  unsigned char* ring;         // the first part of this lane
  const T* rows[kRowsOfLane];  // the pieces of the next chunk

  // Copies item `first` and every `apart`-th item after it.
  __device__ RowCopies(const T* from, const Shape& of, const WgmmaPlan& of_call, unsigned char* of_warp,
                       int first, int apart)
      : x(from),
        shape(of),
        plan(of_call),
        lane(threadIdx.x % kWarp),
        warp_row(threadIdx.x / kWarp % kGroupWarps * kWarpRows),
        step(apart),
        items(plan.items.number(blockIdx.x)),
        item(first),
        ring(of_warp + lane * 16) {}

  // Finds the rows of an item. After the last row of x, the last row is read again, and its result is not
  // used.
  __device__ void find_rows() {
    const Item here = plan.items.at(blockIdx.x, item);
    const int first = warp_row + first_row_of(lane);
    const int64_t after = here.count - here.first;
    const int last = static_cast<int>(after < kGroupRows ? after : kGroupRows) - 1;
    const auto row = [&](int number) { return number < last ? number : last; };
    if (plan.row_step != 0) {
      const T* from = x + here.first * plan.row_step + ChunkLayout<T>::column(lane, 0);
      const T* own = from + first * plan.row_step;
      UEFL_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) rows[i] = own + row_after(i) * plan.row_step;
      if (last + 1 == kGroupRows) return;
      UEFL_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) rows[i] = from + row(first + row_after(i)) * plan.row_step;
      return;
    }
    int64_t codebook;
    const int64_t begin =
        plan.origin.begin(shape, here.output(shape, row(warp_row + lane % kWarpRows)), codebook);
    UEFL_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) {
      rows[i] = x + __shfl_sync(kAllLanes, begin, first_row_of(lane) + row_after(i)) +
                ChunkLayout<T>::column(lane, 0);
    }
  }

  // Starts to copy the next chunk, if there is one.
  __device__ void copy_next() {
    if (item < items) {
      if (chunk == 0) find_rows();
      const int left = static_cast<int>(shape.d) - chunk * kBlockElements;
      UEFL_UNROLL
      for (int part = 0; part < ChunkLayout<T>::kParts; ++part) {
        UEFL_UNROLL
        for (int i = 0; i < kRowsOfLane; ++i)
          copy_async(ring + place + ChunkLayout<T>::place(i, part), rows[i] + part * 32,
                     ChunkLayout<T>::column(lane, part) < left);
      }
      if (kLong) {
        UEFL_UNROLL
        for (int i = 0; i < kRowsOfLane; ++i) rows[i] += kBlockElements;
      }
      if (!kLong || ++chunk == plan.chunks) chunk = 0, item += step;
      place = next(place);
    }
    commit_copies();
  }
  __device__ int next(int from) const {
    const int bytes = step * kGroupWarps * ChunkLayout<T>::kBytes;
    return from + bytes == plan.raw * bytes ? 0 : from + bytes;
  }
  // Waits until the oldest chunk has arrived.
  __device__ void wait() const {
    if (plan.raw == 1) return wait_copies<0>();
    plan.raw == 2 ? wait_copies<1>() : wait_copies<kMostRaw - 1>();
  }
};

// Sums four numbers of each lane over eight neighbors. Returns one of the four sums: number lane / 2 % 4.
__device__ inline float sum_of_eight(const float (&values)[kRowsOfLane], int lane) {
  const bool upper = lane & 4, odd = lane & 2;
  float pair[2];
  UEFL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float other = __shfl_xor_sync(kAllLanes, upper ? values[i] : values[i + 2], 4);
    pair[i] = (upper ? values[i + 2] : values[i]) + other;
  }
  float one = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(kAllLanes, odd ? pair[0] : pair[1], 2);
  return one + __shfl_xor_sync(kAllLanes, one, 1);
}

// Writes the tiles in the order of the items, chunk by chunk.
template <class T, bool kLong>
struct TileWriter {
  using Of = ChunkLayout<T>;
  const Shape& shape;
  const PackedCodebook& packed;
  const WgmmaPlan& plan;
  int lane, warp, step, item, chunk = 0, chunks;
  bool scaled = false;  // the scale is known
  Ring tiles;
  unsigned char* first_tile;  // the place of this lane's first row in the first tile
  Barrier *first_ready, *first_free, *first_slot_free;
  float* first_norm;  // the number that this lane writes: the norm or the error of a row
  RowScale scale{};
  float square[kRowsOfLane] = {}, rest[kRowsOfLane] = {};

  __device__ TileWriter(const Shape& of, const PackedCodebook& codebook, const WgmmaPlan& of_call,
                        const WgmmaMemory& memory, int first, int apart)
      : shape(of),
        packed(codebook),
        plan(of_call),
        lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp % kGroupWarps),
        step(apart),
        item(first),
        chunks(kLong ? plan.chunks : 1),
        tiles{plan.tiles} {
    tiles.advance(first);
    const int row = warp * kWarpRows + first_row_of(lane);
    first_tile = kept_shared(memory.tile(0, 0) + row * (kBlockElements * 2));
    first_ready = kept_shared(memory.tile_ready(0, 0)), first_free = kept_shared(memory.tile_free(0, 0));
    first_slot_free = kept_shared(memory.slot_free(0));
    Slot* slot = memory.slot(0);
    first_norm = kept_shared((lane % 2 == 0 ? slot->norm : slot->rest) + row + row_after(lane / 2 % 4));
  }

  // Writes a part of row i, rounded to float16.
  __device__ void put(const Piece<uint32_t, Of::kElements / 2>& halves, int i, int part,
                      unsigned char* tile) const {
    const int column = Of::column(lane, part), row = first_row_of(lane) + row_after(i),
              at = (column / 8 ^ row % 8) * 16 + column % 8 * 2;
    *reinterpret_cast<Piece<uint32_t, Of::kElements / 2>*>(tile + row_after(i) * (kBlockElements * 2) + at) =
        halves;
  }

  // Writes float16 rows as they are. Adds up the squares of the elements.
  __device__ void copy_rows(const unsigned char* raw, unsigned char* tile) {
    UEFL_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) {
      Piece<uint32_t, Of::kElements / 2> halves =
          *reinterpret_cast<const Piece<uint32_t, Of::kElements / 2>*>(raw + Of::place(i, 0));
      put(halves, i, 0, tile);
      T values[Of::kElements];
      memcpy(static_cast<void*>(values), &halves, sizeof values);
      UEFL_UNROLL
      for (int e = 0; e < Of::kElements; ++e) {
        const auto value = static_cast<float>(widen(values[e]));
        square[i] = fmaf(value, value, square[i]);
      }
    }
  }

  // Writes the scaled rows. Adds up the squares of the scaled elements and of their rounding errors.
  __device__ void convert_rows(const unsigned char* raw, unsigned char* tile) {
    const float* center = packed.center + plan.items.at(blockIdx.x, item).codebook * shape.d;
    UEFL_UNROLL
    for (int part = 0; part < Of::kParts; ++part) {
      const int first = chunk * kBlockElements + Of::column(lane, part);
      float middle[Of::kElements] = {};
      if (scale.centered && first < static_cast<int>(shape.d)) {
        UEFL_UNROLL
        for (int e = 0; e < Of::kElements; e += 4)
          *reinterpret_cast<Four<float>*>(middle + e) = load_four(center + first + e);
      }
      UEFL_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        const auto values = *reinterpret_cast<const Piece<T, Of::kElements>*>(raw + Of::place(i, part));
        Piece<uint32_t, Of::kElements / 2> halves;
        UEFL_UNROLL
        for (int e = 0; e < Of::kElements; e += 4) {
          Four<float> scaled;
          UEFL_UNROLL
          for (int j = 0; j < 4; ++j)
            scaled.values[j] = (widen(values.values[e + j]) - middle[e + j]) * scale.up;
          square[i] = squared(scaled, square[i]);
          const uint2 pair = halves_of(scaled, rest[i]);
          halves.values[e / 2] = pair.x, halves.values[e / 2 + 1] = pair.y;
        }
        put(halves, i, part, tile);
      }
    }
  }

  // Writes the length and the rounding error of the rows, one number in each lane.
  __device__ void write_norms(bool rounded) {
    const float squares = sum_of_eight(square, lane), rests = rounded ? sum_of_eight(rest, lane) : 0;
    barrier_wait(first_slot_free + tiles.place, tiles.parity ^ 1);
    const int d = static_cast<int>(shape.d);
    const float root = scale.rest(lane % 2 == 0 ? squares : rests, d);
    first_norm[tiles.place * (sizeof(Slot) / sizeof(float))] =
        lane % 2 == 0 ? scale.norm_of(root, squares) : root;
    UEFL_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) square[i] = rest[i] = 0;
  }

  __device__ void write(const unsigned char* raw) {
    if (!scaled || (chunk == 0 && shape.codebooks > 1))
      scale = RowScale(shape, packed, plan.items.at(blockIdx.x, item).codebook, is_half(T{})), scaled = true;
    const int number = tiles.place * chunks + chunk;
    barrier_wait(first_free + number, tiles.parity ^ 1);
    unsigned char* tile = first_tile + number * kTileBytes;
    const bool rounded = !is_half(T{}) || scale.centered;
    rounded ? convert_rows(raw, tile) : copy_rows(raw, tile);
    if (chunk + 1 == chunks) write_norms(rounded);
    if (kLong) fence_proxy_async();  // short rows are read by ordinary loads
    barrier_arrive_by_warp(first_ready + number);
    if (++chunk == chunks) chunk = 0, item += step, tiles.advance(step);
  }
};

// Prepares item `which` and every kPreparers-th item after it.
template <class T, bool kLong, int kPreparers>
__device__ void prepare(const T* x, const Shape& shape, const PackedCodebook& packed, const WgmmaPlan& plan,
                        const WgmmaMemory& memory, int which) {
  const int warp = which * kGroupWarps + threadIdx.x / kWarp % kGroupWarps;
  RowCopies<T, kLong> copies(x, shape, plan, kept_shared(memory.raw() + warp * ChunkLayout<T>::kBytes), which,
                             kPreparers);
  TileWriter<T, kLong> writer(shape, packed, plan, memory, which, kPreparers);
  for (int i = 0; i < plan.raw; ++i) copies.copy_next();
  for (int place = 0; writer.item < copies.items; place = copies.next(place)) {
    copies.wait();
    writer.write(copies.ring + place);
    copies.copy_next();
  }
}

}  // namespace
}  // namespace uefl::cuda
