// The last role of search_wgmma finds the nearest codeword of each row, and tests whether it is certain.
//
// For each of the four lanes of a row, multiply() gives the codeword with the least score (kCross), or a
// group of four codewords that contains it. Such a group is scored again. If a row is open only between the
// least codewords of two lanes, the warp decides it here by the definition. Other open rows go on a list. At
// the end, some warps of the block run the second phase of vq_assign_mma.h for the rows of the lists.
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

// Scores the four codewords of a row's best group again, and releases the row's tile. Returns the best and
// the second-best of the four scores.
template <bool kLong>
__device__ TopTwo score_again(int least_code, int lane, int warp, int chunks, const PackedCodebook& packed,
                              const WgmmaPlan& plan, const WgmmaMemory& memory, int64_t codebook, int place,
                              const Judge& judge) {
  const int first_tile = static_cast<int>(codebook) * plan.items.code_tiles;
  Again again(least_code, lane);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    again.lane = opaque(again.lane);  // otherwise addresses stay in registers from chunk to chunk
    again.add(memory.tile(place, chunk) + warp * (kWarpRows * kBlockElements * 2), [&](int block) {
      const int number = (first_tile + block) * chunks + chunk;
      return !kLong && plan.resident ? memory.codewords(number)
                                     : packed.halves + int64_t{number} * kBlockHalves;
    });
    barrier_arrive_by_warp(memory.tile_free(place, chunk));
  }
  const int code = again.code();
  const float* start = packed.starts + int64_t{first_tile + code / kBlockCodewords} * kStarts +
                       start_place(code % kBlockCodewords);
  return again.result({start[0], start[1]}, judge.down, packed.shift);
}

template <class T, bool kLong, bool kCross, int kDone>
__device__ void finish(const T* x, const Shape& shape, const PackedCodebook& packed, const WgmmaPlan& plan,
                       const WgmmaMemory& memory, bool exact, int64_t* indices, int* open) {
  constexpr int kOf = kCross ? 2 : 8, kLanes = kWarp / kOf;  // codewords of a row that is open between two lanes
  const int warp = threadIdx.x / kWarp % kGroupWarps, lane = threadIdx.x % kWarp,
            row = warp * kWarpRows + row_of(lane);
  const int items = plan.items.number(blockIdx.x), chunks = kLong ? plan.chunks : 1;
  OpenRows list(packed, static_cast<int>(blockIdx.x) * kGroupWarps + warp, plan.room);
  Ring tiles{plan.tiles};
  Judge judge;
  for (int number = 0; number < items; ++number, tiles.advance()) {
    const Item item = plan.items.at(blockIdx.x, number);
    if (number == 0 || shape.codebooks > 1)
      judge = Judge(shape, packed, item.codebook, RowScale(shape, packed, item.codebook, is_half(T{})).down);
    barrier_wait(memory.found(tiles.place), tiles.parity);
    const Slot* slot = memory.slot(tiles.place);
    const RowCandidates known = candidates_of(slot->found[row], lane);
    TopTwo found{known.best, lesser(known.next, known.third), known.best_code};
    if constexpr (!kCross) {
      const TopTwo four = score_again<kLong>(known.best_code, lane, warp, chunks, packed, plan, memory,
                                             item.codebook, tiles.place, judge);
      found = {four.best, lesser(found.second, four.second), four.index};
    }
    const float norm = slot->norm[row], rest = slot->rest[row];
    barrier_arrive_by_warp(memory.slot_free(tiles.place));
    const Verdict verdict(norm, rest, judge);
    const bool mine = lane % 2 == 0 && item.first + row < item.count;
    const bool certain = verdict.holds() && (!exact || verdict.apart(found.best, found.second));
    const int64_t output = item.output(shape, row);
    if (mine && certain) indices[output] = found.index;
    if (!__any_sync(kAllLanes, mine && !certain)) continue;
    const bool few = verdict.holds() && !certain && verdict.apart(found.best, known.third);
    list.push(mine && !certain && !few, output, verdict.limit(found.best, judge.base));
    for (unsigned votes = __ballot_sync(kAllLanes, mine && few); votes != 0; votes &= votes - 1) {
      const int from = __ffs(votes) - 1, which = lane / kLanes;
      const int best = __shfl_sync(kAllLanes, known.best_code, from),
                next = __shfl_sync(kAllLanes, known.next_code, from);
      const int first = which < kOf / 2 ? best : next,
                code = kCross ? first : code_in_group(first, which % 4);
      const int64_t settled = __shfl_sync(kAllLanes, output, from);
      int64_t codebook;
      const T* begin = x + plan.origin.begin(shape, settled, codebook);
      const int64_t index = nearest_of<kOf, kLong ? 2 : 1>(begin, shape, packed.exact + codebook * shape.k * shape.d,
                                               code < shape.k ? code : -1);
      if (lane == 0) indices[settled] = index;
    }
  }
  if (lane == 0) open[warp] = list.count;
  named_arrive(kDoneBarrier, kDone);
}

}  // namespace
}  // namespace uefl::cuda
