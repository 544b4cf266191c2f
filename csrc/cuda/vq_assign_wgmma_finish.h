// The last role of search_wgmma finds the nearest codeword of each row, and tests whether it is certain.
//
// For each of the four lanes of a row, multiply() gives the two least scores and the codeword of the least
// one. A row that is not certain goes on the list of the warp: from the end of the list if the row is open
// only between the codewords of two lanes, otherwise from its beginning. When the rows of the thread block
// are finished, decide_pairs() decides the first kind by the definition. Meanwhile other warps run the second
// phase of vq_assign_mma.h for the other rows.
//
// One thread of this role also copies the codebook, because it waits most of the time. If each block of the
// codebook has a place, this thread copies all blocks at once.
#pragma once

#include "cuda/vq_assign_definition.h"
#include "cuda/vq_assign_wgmma_plan.h"

namespace uefl::cuda {
namespace {

struct WgmmaMemory {
  const WgmmaPlan& plan;

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(dynamic_memory() + offset);
  }
  __device__ uint16_t* codewords(int place) const { return at<uint16_t>(place * kBlockBytes); }
  __device__ float* starts(int place) const { return at<float>(plan.starts_at + place * kStartBytes); }
  __device__ unsigned char* tile(int place, int chunk) const {
    return at<unsigned char>(plan.tiles_at + (place * plan.chunks + chunk) * kTileBytes);
  }
  __device__ Slot* slot(int place) const { return at<Slot>(plan.slots_at) + place; }
  __device__ unsigned char* raw() const { return at<unsigned char>(plan.raw_at); }

  __device__ Barrier* barrier(int number) const { return at<Barrier>(plan.barriers_at) + number; }
  __device__ Barrier* codewords_full(int place) const { return barrier(place); }
  __device__ Barrier* codewords_empty(int place) const { return barrier(plan.codewords + place); }
  __device__ Barrier* tile_ready(int place, int chunk) const {
    return barrier(2 * plan.codewords + place * plan.chunks + chunk);
  }
  __device__ Barrier* tile_free(int place, int chunk) const { return tile_ready(plan.tiles + place, chunk); }
  __device__ Barrier* found(int place) const { return tile_ready(2 * plan.tiles, place); }
  __device__ Barrier* slot_free(int place) const { return found(plan.tiles + place); }

  // Initializes the barriers. A copy arrives once. A role arrives with one lane of each of its warps.
  __device__ void make_barriers(int multiply_warps) const {
    for (int i = 0; i < plan.codewords; ++i) {
      barrier_init(codewords_full(i), 1);
      barrier_init(codewords_empty(i), multiply_warps);
    }
    for (int i = 0; i < 2 * plan.tiles * (plan.chunks + 1); ++i) barrier_init(tile_ready(0, i), kGroupWarps);
  }
};

// The state of a row after its lanes are merged: the best and the second-best of the best scores of the four
// lanes, with their codewords, and the best of all other scores.
struct RowCandidates {
  int best, next, third;
  int best_code, next_code;

  __device__ void merge(const RowCandidates& other) {
    const bool later = other.best < best;
    const int greater_best = greater(best, other.best), lesser_next = lesser(next, other.next);
    const int greater_code = later ? best_code : other.best_code,
              lesser_code = other.next < next ? other.next_code : next_code;
    const bool of_best = greater_best < lesser_next;
    third = least(third, other.third, greater(greater_best, lesser_next));
    next = of_best ? greater_best : lesser_next, next_code = of_best ? greater_code : lesser_code;
    best_code = later ? other.best_code : best_code, best = lesser(best, other.best);
  }
};

__device__ inline RowCandidates candidates_of(const LaneScores (&found)[4], int lane) {
  const int first = lane % 2 * 2;
  const auto of = [&](int t) {
    const LaneScores one = found[t];
    return RowCandidates{one.scores.best, INT_MAX, one.scores.second,
                         codeword_of<kWgmmaColumns>(one.tile, one.scores.best, t), 0};
  };
  RowCandidates all = of(first);
  all.merge(of(first + 1));
  all.merge({__shfl_xor_sync(kAllLanes, all.best, 1), __shfl_xor_sync(kAllLanes, all.next, 1),
             __shfl_xor_sync(kAllLanes, all.third, 1), __shfl_xor_sync(kAllLanes, all.best_code, 1),
             __shfl_xor_sync(kAllLanes, all.next_code, 1)});
  return all;
}

// Decides the rows of the thread block that are open between two codewords, by the definition. `warps` warps
// call it, each with its number. A warp takes kAtOnce rows at once. few: the number of such rows on each
// list.
template <bool kLong, class T>
__device__ void decide_pairs(const T* x, const Shape& shape, const PackedCodebook& packed,
                             const WgmmaPlan& plan, const int* few, int warp, int warps, int64_t* indices) {
  constexpr int kAtOnce = 2, kRowLanes = kWarp / kAtOnce;
  const int lane = threadIdx.x % kWarp;
  int all = 0;
  for (int list = 0; list < kGroupWarps; ++list) all += few[list];
  for (int first = warp * kAtOnce; first < all; first += warps * kAtOnce) {
    const int number = first + lane / kRowLanes;
    const bool there = number < all;
    int entry = there ? number : first, list = 0;
    while (entry >= few[list]) entry -= few[list++];
    const OpenRows rows(packed, static_cast<int>(blockIdx.x) * kGroupWarps + list, plan.room);
    const Listed row = packed.listed[rows.place_from_end(entry)];
    int64_t codebook;
    const T* from = x + plan.origin.begin(shape, row.output, codebook);
    const int code = lane % kRowLanes < kRowLanes / 2 ? row.codes[0] : row.codes[1];
    const int64_t index =
        nearest_of<2, kAtOnce, kLong ? 4 : 1>(from, shape, packed.exact + codebook * shape.k * shape.d, code);
    if (there && lane % kRowLanes == 0) indices[row.output] = index;
  }
}

// The blocks of the codebook in the order of multiplication. One thread copies them to the places of a ring.
struct CodewordBlocks {
  const PackedCodebook& packed;
  const WgmmaPlan& plan;
  const WgmmaMemory& memory;
  Ring ring;
  int rounds, round = 0, tile = 0, chunk = 0;  // rounds: 0 if this thread does not copy

  __device__ CodewordBlocks(const PackedCodebook& of, const WgmmaPlan& of_call, const WgmmaMemory& shared,
                            bool copies)
      : packed(of),
        plan(of_call),
        memory(shared),
        ring{plan.codewords},
        rounds(!copies         ? 0
               : plan.resident ? 1
                               : plan.items.rounds(blockIdx.x)) {}

  // Waits for a barrier, and copies blocks meanwhile.
  __device__ void copy_until(Barrier* barrier, unsigned parity) {
    if (threadIdx.x % kGroupThreads >= kWarp) return barrier_wait(barrier, parity);
    do copy();
    while (!barrier_over(barrier, parity));
    __syncwarp();
  }
  // Copies blocks to all places that are free.
  __device__ void copy() {
    while (round < rounds && barrier_over(memory.codewords_empty(ring.place), ring.parity ^ 1)) copy_next();
  }

  __device__ void copy_next() {
    const int64_t number =
        int64_t{plan.resident ? 0 : plan.items.codebook(blockIdx.x, round)} * plan.items.code_tiles + tile;
    const uint16_t* block = packed.halves + (number * plan.chunks + chunk) * kBlockHalves;
    Barrier* full = memory.codewords_full(ring.place);
    const bool last_chunk = chunk + 1 == plan.chunks;  // the starts of the tile come with it
    barrier_arrive_expecting(full, last_chunk ? kBlockBytes + kStartBytes : kBlockBytes);
    copy_bulk(memory.codewords(ring.place), block, kBlockBytes, full);
    if (last_chunk) copy_bulk(memory.starts(ring.place), packed.starts + number * kStarts, kStartBytes, full);
    ring.advance();
    ++chunk;
    if (!last_chunk) return;
    chunk = 0;
    const int tiles = static_cast<int>(plan.resident ? plan.items.codebooks : 1) * plan.items.code_tiles;
    if (++tile == tiles) tile = 0, ++round;
  }
};

template <class T>
__device__ void finish(const Shape& shape, const PackedCodebook& packed, const WgmmaPlan& plan,
                       const WgmmaMemory& memory, bool exact, int64_t* indices, int* open, int* few) {
  const int warp = threadIdx.x / kWarp % kGroupWarps, lane = threadIdx.x % kWarp,
            row = warp * kWarpRows + row_of(lane);
  const int items = plan.items.number(blockIdx.x);
  OpenRows list(packed, static_cast<int>(blockIdx.x) * kGroupWarps + warp, plan.room);
  Ring tiles{plan.tiles};
  RowBounds bounds;
  CodewordBlocks blocks(packed, plan, memory, threadIdx.x % kGroupThreads == 0);
  blocks.copy();
  for (int number = 0; number < items; ++number, tiles.advance()) {
    const Item item = plan.items.at(blockIdx.x, number);
    if (number == 0 || shape.codebooks > 1)
      bounds =
          RowBounds(shape, packed, item.codebook, RowScale(shape, packed, item.codebook, is_half(T{})).down);
    blocks.copy_until(memory.found(tiles.place), tiles.parity);
    const Slot* slot = memory.slot(tiles.place);
    const RowCandidates known = candidates_of(slot->found[row], lane);
    const int second = lesser(known.next, known.third);
    const float norm = slot->norm[row], rest = slot->rest[row];
    barrier_arrive_by_warp(memory.slot_free(tiles.place));
    const RowCertificate proof(norm, rest, bounds);
    const bool mine = lane % 2 == 0 && item.first + row < item.count;
    const bool certain = proof.holds() && (!exact || proof.apart(known.best, second));
    const int64_t output = item.output(shape, row);
    if (mine && certain) indices[output] = known.best_code;
    if (!__any_sync(kAllLanes, mine && !certain)) continue;
    const bool between_two = proof.holds() && !certain && proof.apart(known.best, known.third);
    list.push_few(mine && between_two, {output, {known.best_code, known.next_code}});
    list.push(mine && !certain && !between_two, output, proof.limit(known.best, bounds.base));
  }
  if (lane == 0) open[warp] = list.count, few[warp] = list.few;
}

}  // namespace
}  // namespace uefl::cuda
