// The first role of search_wgmma reads the rows of x, and converts them to float16 tiles.
//
// A warp takes 16 rows. Lane 8 g + p takes piece p of four of them: 16 bytes of a tile, which are eight
// elements. As soon as it has converted a piece, it reads the same piece of the next chunk.
#pragma once

#include "cuda/vq_assign_wgmma_finish.h"

namespace uefl::cuda {
namespace {

constexpr int kRowsOfLane = 4;

// Returns the first of the four rows of a lane. Half a warp writes 8 bytes of float32 rows at once: rows r and
// r + 4, which use different banks because of the swizzle.
__device__ inline int first_row_of(int lane) { return lane / 8 % 2 * 4 + lane / 16; }
// Returns how far another row of the lane is from the first one.
__device__ constexpr int row_after(int i) { return i % 2 * 2 + i / 2 * 8; }

// One chunk of the rows of a lane. float32 elements take two reads of a row.
template <class T>
struct RowPieces {
  static constexpr int kParts = sizeof(T) / 2, kElements = 8 / kParts;
  uint4 of[kRowsOfLane][kParts];

  // Returns the element of a chunk at which a part of this lane begins.
  __device__ static int column(int lane, int part) { return part * 32 + lane % 8 * kElements; }
};

// Reads the rows of a block in the order of its items, chunk by chunk.
template <class T, bool kLong>
struct RowReader {
  const T* x;
  const Shape& shape;
  const WgmmaPlan& plan;
  int lane, warp_row, items, item = -1, chunk = 0;
  const T* rows[kRowsOfLane];  // where this lane reads

  __device__ RowReader(const T* from, const Shape& of, const WgmmaPlan& of_call, int count)
      : x(from),
        shape(of),
        plan(of_call),
        lane(threadIdx.x % kWarp),
        warp_row(threadIdx.x / kWarp % kGroupWarps * kWarpRows),
        items(count) {}

  // Finds the rows of an item. After the last row of x, the last row is read again, and its result is not used.
  __device__ void find_rows() {
    const Item here = plan.items.at(blockIdx.x, item);
    const int64_t after = here.count - here.first;
    const int last = static_cast<int>(after < kGroupRows ? after : kGroupRows) - 1,
              first = warp_row + first_row_of(lane);
    const auto row = [&](int number) { return number < last ? number : last; };
    if (plan.row_step != 0) {
      const T* from = x + here.first * plan.row_step + RowPieces<T>::column(lane, 0);
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
                RowPieces<T>::column(lane, 0);
    }
  }

  // Goes to the next chunk. Returns false after the last one.
  __device__ bool advance() {
    if (kLong && item >= 0 && ++chunk < plan.chunks) {
      UEFL_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) rows[i] += kBlockElements;
      return true;
    }
    chunk = 0;
    if (++item >= items) return false;
    find_rows();
    return true;
  }
  // Returns true if a part of this lane is inside the rows.
  __device__ bool inside(int part) const {
    return chunk * kBlockElements + RowPieces<T>::column(lane, part) < shape.d;
  }
  __device__ uint4 read(int part, int i, bool there) const { return load_if(rows[i] + part * 32, there); }
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
  using Pieces = RowPieces<T>;
  const Shape& shape;
  const PackedCodebook& packed;
  const WgmmaPlan& plan;
  int lane, warp, item = 0, chunk = 0, chunks;
  Ring tiles;
  unsigned char* first_tile;  // the place of this lane's first row in the first tile
  Barrier *first_ready, *first_free, *first_slot_free;
  float* first_norm;  // of the row whose norm or error this lane writes
  RowScale scale{};
  float square[kRowsOfLane] = {}, rest[kRowsOfLane] = {};

  __device__ TileWriter(const Shape& of, const PackedCodebook& codebook, const WgmmaPlan& of_call,
                        const WgmmaMemory& memory)
      : shape(of),
        packed(codebook),
        plan(of_call),
        lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp % kGroupWarps),
        chunks(kLong ? plan.chunks : 1),
        tiles{plan.tiles} {
    const int row = first_row_of(lane), which = lane / 2 % 4;
    first_tile = kept_shared(memory.tile(0, 0) + (warp * kWarpRows + row) * (kBlockElements * 2));
    first_ready = kept_shared(memory.tile_ready(0, 0)), first_free = kept_shared(memory.tile_free(0, 0));
    first_slot_free = kept_shared(memory.slot_free(0));
    Slot* slot = memory.slot(0);
    first_norm = kept_shared((lane % 2 == 0 ? slot->norm : slot->rest) + warp * kWarpRows + row +
                             row_after(which));
  }

  // Rounds a part of a row to float16. Adds up the squares of the scaled elements and of their errors.
  __device__ void convert(const T (&from)[Pieces::kElements], const float (&middle)[Pieces::kElements],
                          int i, uint32_t (&halves)[Pieces::kElements / 2]) {
    UEFL_UNROLL
    for (int e = 0; e < Pieces::kElements; e += 4) {
      Four<float> scaled;
      UEFL_UNROLL
      for (int j = 0; j < 4; ++j) scaled.values[j] = (widen(from[e + j]) - middle[e + j]) * scale.up;
      square[i] = squared(scaled, square[i]);
      const uint2 pair = halves_of(scaled, rest[i]);
      halves[e / 2] = pair.x, halves[e / 2 + 1] = pair.y;
    }
  }

  // Writes a chunk of the rows of this lane, and reads the next one if there is one.
  __device__ void write_rows(Pieces& pieces, unsigned char* tile, const RowReader<T, kLong>& next,
                             bool more) {
    constexpr int kElements = Pieces::kElements;
    const int row = first_row_of(lane);
    UEFL_UNROLL
    for (int part = 0; part < Pieces::kParts; ++part) {
      const int column = Pieces::column(lane, part), first = chunk * kBlockElements + column;
      const bool there = more && next.inside(part);
      float middle[kElements] = {};
      if (scale.centered && first < shape.d) {
        const float* center = packed.center + plan.items.at(blockIdx.x, item).codebook * shape.d + first;
        UEFL_UNROLL
        for (int e = 0; e < kElements; e += 4)
          *reinterpret_cast<Four<float>*>(middle + e) = load_four(center + e);
      }
      UEFL_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        Piece<uint32_t, kElements / 2> halves;
        T values[kElements];
        memcpy(static_cast<void*>(values), &pieces.of[i][part], sizeof values);
        if (is_half(T{}) && !scale.centered) {
          memcpy(static_cast<void*>(&halves), &pieces.of[i][part], sizeof halves);
          UEFL_UNROLL
          for (int e = 0; e < kElements; ++e) {
            const auto value = static_cast<float>(widen(values[e]));
            square[i] = fmaf(value, value, square[i]);
          }
        } else {
          convert(values, middle, i, halves.values);
        }
        const int place = (column / 8 ^ (row + row_after(i)) % 8) * 16 + column % 8 * 2;
        *reinterpret_cast<decltype(halves)*>(tile + row_after(i) * (kBlockElements * 2) + place) = halves;
        pieces.of[i][part] = next.read(part, i, there);
      }
    }
  }

  // Writes the length and the rounding error of the rows, one number in each lane.
  __device__ void write_norms() {
    const float squares = sum_of_eight(square, lane), rests = sum_of_eight(rest, lane);
    barrier_wait(first_slot_free + tiles.place, tiles.parity ^ 1);
    const int d = static_cast<int>(shape.d);
    float* target = first_norm + tiles.place * (sizeof(Slot) / sizeof(float));
    *target = lane % 2 == 0 ? scale.norm(squares, d) : scale.rest(rests, d);
    UEFL_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) square[i] = rest[i] = 0;
  }

  __device__ void write(Pieces& pieces, const RowReader<T, kLong>& next, bool more) {
    if (chunk == 0 && (item == 0 || shape.codebooks > 1))
      scale = RowScale(shape, packed, plan.items.at(blockIdx.x, item).codebook, is_half(T{}));
    const int number = tiles.place * chunks + chunk;
    barrier_wait(first_free + number, tiles.parity ^ 1);
    write_rows(pieces, first_tile + number * kTileBytes, next, more);
    if (chunk + 1 == chunks) write_norms();
    if (kLong) fence_proxy_async();  // short rows are read by ordinary loads
    barrier_arrive_by_warp(first_ready + number);
    if (++chunk == chunks) chunk = 0, ++item, tiles.advance();
  }
};

template <class T, bool kLong>
__device__ void prepare(const T* x, const Shape& shape, const PackedCodebook& packed, const WgmmaPlan& plan,
                        const WgmmaMemory& memory) {
  RowReader<T, kLong> reader(x, shape, plan, plan.items.number(blockIdx.x));
  TileWriter<T, kLong> writer(shape, packed, plan, memory);
  RowPieces<T> pieces{};
  bool more = reader.advance();
  UEFL_UNROLL
  for (int part = 0; part < RowPieces<T>::kParts; ++part) {
    UEFL_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i)
      pieces.of[i][part] = reader.read(part, i, more && reader.inside(part));
  }
  while (more) {
    more = reader.advance();
    writer.write(pieces, reader, more);
  }
}

}  // namespace
}  // namespace uefl::cuda
