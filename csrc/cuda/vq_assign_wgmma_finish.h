// The last role of search_wgmma finds the nearest codeword of each row, and tests whether it is certain.
//
// For each of the four lanes of a row, multiply() gives the codeword with the least score (kCross), or a
// group of four codewords that contains it. Such a group is scored again. Rows that are not certain go on the
// list of the warp: from its end if they are open only between the least codewords of two lanes, otherwise
// from its beginning. When all rows of the block are finished, settle() decides the first kind by the
// definition, and the second phase of vq_assign_mma.h decides the others.
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

// Decides the rows that are open between a few codewords, by the definition. A lane takes one codeword.
template <class T, bool kCross>
__device__ void settle(const T* x, const Shape& shape, const PackedCodebook& packed, const WgmmaPlan& plan,
                       const int* few, int64_t* indices) {
  constexpr int kOf = kCross ? 2 : 8;  // number of codewords
  const int thread = mma_thread(), which = thread % kOf;
  int all = 0;
  for (int list = 0; list < kGroupWarps; ++list) all += few[list];
  for (int first = 0; first < all; first += kThreads / kOf) {
    int entry = first + thread / kOf, list = 0;
    const bool there = entry < all;
    while (there && entry >= few[list]) entry -= few[list++];
    Nearest found;
    int64_t output = 0;
    if (there) {
      const OpenRows rows(packed, static_cast<int>(blockIdx.x) * kGroupWarps + list, plan.room);
      const Listed row = packed.listed[rows.place_from_end(entry)];
      const int of_lane = which < kOf / 2 ? row.codes[0] : row.codes[1],
                code = kCross ? of_lane : code_in_group(of_lane, which % 4);
      output = row.output;
      int64_t codebook;
      const T* from = x + plan.origin.begin(shape, output, codebook);
      const double* codeword = packed.exact + (codebook * shape.k + code) * shape.d;
      if (code < shape.k) found.add(distance_in_pieces(from, codeword, shape.d, shape.euclidean), code);
    }
    found.merge<kOf>();
    if (there && which == 0) indices[output] = found.index;
  }
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

template <bool kLong, bool kCross, int kDone>
__device__ void finish(const Shape& shape, const PackedCodebook& packed, const WgmmaPlan& plan,
                       const WgmmaMemory& memory, bool halves, bool exact, int64_t* indices, int* open,
                       int* few) {
  const int warp = threadIdx.x / kWarp % kGroupWarps, lane = threadIdx.x % kWarp,
            row = warp * kWarpRows + row_of(lane);
  const int items = plan.items.number(blockIdx.x), chunks = kLong ? plan.chunks : 1;
  OpenRows list(packed, static_cast<int>(blockIdx.x) * kGroupWarps + warp, plan.room);
  Ring tiles{plan.tiles};
  Judge judge;
  for (int number = 0; number < items; ++number, tiles.advance()) {
    const Item item = plan.items.at(blockIdx.x, number);
    if (number == 0 || shape.codebooks > 1)
      judge = Judge(shape, packed, item.codebook, RowScale(shape, packed, item.codebook, halves).down);
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
    const bool between_two = verdict.holds() && !certain && verdict.apart(found.best, known.third);
    list.push_few(mine && between_two, {output, {known.best_code, known.next_code}});
    list.push(mine && !certain && !between_two, output, verdict.limit(found.best, judge.base));
  }
  if (lane == 0) open[warp] = list.count, few[warp] = list.few;
  named_arrive(kDoneBarrier, kDone);
}

}  // namespace
}  // namespace uefl::cuda
