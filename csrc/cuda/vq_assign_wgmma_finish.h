// The last role of search_wgmma finds the nearest codeword of each row, tests whether it is certain, and
// decides the open rows.
//
// For each of the four lanes of a row, multiply() gives the codeword with the least score (kCross), or a
// group of four codewords that contains it. Such a group is scored again. If a row is open only between the
// least codewords of two lanes, the definition decides it here. Other open rows go on a list. At the end,
// some warps of the block run the second phase of vq_assign_mma.h for the rows of the lists.
#pragma once

#include "cuda/vq_assign_definition.h"
#include "cuda/vq_assign_wgmma_plan.h"
#include "cuda/vq_gather.h"

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
  __device__ unsigned char* raw(int place) const {
    return at<unsigned char>(plan.raw_at + place * kWarpRows * plan.row_bytes);
  }

  __device__ Barrier* barrier(int number) const { return at<Barrier>(plan.barriers_at) + number; }
  __device__ Barrier* codewords_full(int place) const { return barrier(place); }
  __device__ Barrier* codewords_empty(int place) const { return barrier(plan.codewords + place); }
  __device__ Barrier* tile_ready(int place, int chunk) const {
    return barrier(2 * plan.codewords + place * plan.chunks + chunk);
  }
  __device__ Barrier* tile_free(int place, int chunk) const { return tile_ready(plan.tiles + place, chunk); }
  __device__ Barrier* found(int place) const { return tile_ready(2 * plan.tiles, place); }
  __device__ Barrier* slot_free(int place) const { return found(plan.tiles + place); }
  __device__ Barrier* raw_full(int place) const { return found(2 * plan.tiles + place); }

  // Initializes the barriers. A copy arrives once. A role arrives with one lane of each of its warps. If
  // blocks share their reads of the codebook, the warps of all these blocks arrive.
  __device__ void make_barriers(int multiply_warps) const {
    for (int i = 0; i < plan.codewords; ++i) {
      barrier_init(codewords_full(i), 1);
      barrier_init(codewords_empty(i), multiply_warps * plan.items.together);
    }
    for (int i = 0; i < 2 * plan.tiles * (plan.chunks + 1); ++i) barrier_init(tile_ready(0, i), kGroupWarps);
    for (int i = 0; i < kGroupWarps * plan.raw; ++i) barrier_init(raw_full(i), 1);
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

// A row of a lane and the index of its codeword. output is negative if the lane has no row.
struct Choice {
  int64_t output;
  int index;
};

// Decides rows that are open between a few codewords, by the definition. A lane takes one codeword. A warp
// takes the last rows of the list, at most kWarp / kOf.
template <class T, int kOf>
__device__ Choice settle(const T* x, const Shape& shape, const PackedCodebook& packed, const Origin& origin,
                         const Pending* pending, int& count, int lane) {
  const int rows = count < kWarp / kOf ? count : kWarp / kOf, which = lane % kOf;
  Nearest found;
  int64_t output = -1;
  if (lane / kOf < rows) {
    const Pending row = pending[count - rows + lane / kOf];
    const int first = which < kOf / 2 ? row.first : row.next,
              code = kOf == 2 ? first : code_in_group(first, which % 4);
    output = row.output;
    int64_t codebook;
    const T* from = x + origin.begin(shape, output, codebook);
    const double* codeword = packed.exact + (codebook * shape.k + code) * shape.d;
    if (code < shape.k) found.add(distance<2>(from, shape.stride, codeword, shape.d, shape.euclidean), code);
  }
  found.merge<kOf>();
  count -= rows;
  __syncwarp();  // before the list is written again
  return {which == 0 ? output : -1, static_cast<int>(found.index)};
}

// Quantizes rows for vq while they are still in the cache. A warp copies their codewords, 16 bytes of x at a
// time, and adds up the errors of each lane.
template <class T>
struct Take {
  const T* x;
  const Shape& shape;
  const Origin& origin;
  const Steps& steps;
  const Quantized& wanted;
  Chosen* chosen;  // of the warp
  double error = 0;

  // Adds the rows of the lanes, at most 16.
  __device__ void add(const Choice& mine, int lane) {
    const unsigned votes = __ballot_sync(kAllLanes, mine.output >= 0);
    const int rows = __popc(votes);
    if (mine.output >= 0) {
      int64_t codebook;
      const int64_t begin = origin.begin(shape, mine.output, codebook);
      chosen[__popc(votes & ((1u << lane) - 1))] = {begin, mine.output,
                                                    static_cast<int>(codebook * shape.k) + mine.index};
    }
    __syncwarp();
    const int code = lane < rows ? chosen[lane].code : -1;
    const unsigned same = __match_any_sync(kAllLanes, code);
    if (code >= 0 && is_first_lane(same)) add_to(wanted.counts + code, __popc(same));
    copy(rows, lane);
    __syncwarp();  // before the rows are written again
  }

  __device__ void copy(int rows, int lane) {
    constexpr int kPiece = kTakePiece, kPieces = 2;  // kPieces: pieces that a lane has in flight
    int row, piece;
    steps.first(lane, row, piece);
    while (row < rows) {
      Piece<T, kPiece> value[kPieces];
      Piece<float, kPiece> close[kPieces];
      const int place = opaque(piece << 8 | row);  // the piece that is read, and later written
      UEFL_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        if (row < rows) {
          const Chosen& one = chosen[row];
          const int64_t column = piece * kPiece;
          value[i] = *reinterpret_cast<const Piece<T, kPiece>*>(x + one.begin + column);
          close[i] =
              *reinterpret_cast<const Piece<float, kPiece>*>(wanted.codewords + one.code * shape.d + column);
        }
        steps.advance(row, piece);
      }
      row = place & 255, piece = place >> 8;
      UEFL_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        if (row < rows) {
          T* target = static_cast<T*>(wanted.target) + chosen[row].output * shape.d + piece * kPiece;
          error += quantize(value[i], close[i], target);
        }
        steps.advance(row, piece);
      }
    }
  }
};

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

// Quantizes the rows of a list after the second phase has found their codewords.
template <class T>
__device__ void take_listed(const OpenRows& list, const PackedCodebook& packed, const int64_t* indices,
                            Take<T>& take, int lane) {
  for (int first = 0; first < list.count; first += kWarpRows) {
    const int64_t output =
        lane < kWarpRows && first + lane < list.count ? packed.listed[list.place(first + lane)] : -1;
    take.add({output, output < 0 ? 0 : static_cast<int>(indices[output])}, lane);
  }
}

template <class T, bool kLong, bool kCross, int kDone>
__device__ void finish(const T* x, const Shape& shape, const PackedCodebook& packed, const WgmmaPlan& plan,
                       const WgmmaMemory& memory, bool exact, int64_t* indices, const Quantized& wanted,
                       Judge* judges, int* open) {
  constexpr int kOf = kCross ? 2 : 8;  // number of codewords between which a row is decided
  const int warp = threadIdx.x / kWarp % kGroupWarps;
  const int items = plan.items.number(blockIdx.x), chunks = kLong ? plan.chunks : 1;
  Pending* pending = memory.at<Pending>(plan.pending_at) + warp * kMostPending;
  OpenRows list(packed, static_cast<int>(blockIdx.x) * kGroupWarps + warp, plan.room);
  int waiting = 0;  // rows that are pending
  Take<T> take{x,          shape,  plan.origin,
               plan.steps, wanted, memory.at<Chosen>(plan.chosen_at) + warp * kWarpRows};
  Ring tiles{plan.tiles};
  const Judge& judge = judges[warp];
  for (int number = 0; number < items; ++number, tiles.advance()) {
    const Item item = plan.items.at(blockIdx.x, number);
    const int lane = opaque(static_cast<int>(threadIdx.x % kWarp)), row = warp * kWarpRows + row_of(lane);
    if (number == 0 || shape.codebooks > 1) {
      const float down = RowScale(shape, packed, item.codebook, is_half(T{})).down;
      if (lane == 0) judges[warp] = Judge(shape, packed, item.codebook, down);
      __syncwarp();
    }
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
    __syncwarp();  // all lanes have read the buffer that is released
    if (lane == 0) barrier_arrive(memory.slot_free(tiles.place));
    const Verdict verdict(norm <= judge.longest ? norm : INFINITY, rest, judge.certificate, judge.base);
    const bool mine = lane % 2 == 0 && item.first + row < item.count;
    const bool certain = verdict.holds() && (!exact || verdict.apart(found.best, found.second));
    const bool few = verdict.holds() && !certain && verdict.apart(found.best, known.third);
    const int64_t output = item.output(shape, row);
    const unsigned votes = __ballot_sync(kAllLanes, mine && few);
    if (mine && few)
      pending[waiting + __popc(votes & ((1u << lane) - 1))] = {output, known.best_code, known.next_code};
    waiting += __popc(votes);
    list.push(mine && !certain && !few, output, verdict.limit(found.best, judge.base));
    __syncwarp();
    const int enough = number + 1 == items ? 1 : kWarp / kOf;
    Choice choice{mine && certain ? output : -1, found.index};
    while (true) {
      if (choice.output >= 0) indices[choice.output] = choice.index;
      if (wanted.target != nullptr) take.add(choice, lane);
      if (waiting < enough) break;
      choice = settle<T, kOf>(x, shape, packed, plan.origin, pending, waiting, lane);
    }
  }
  const int lane = opaque(static_cast<int>(threadIdx.x % kWarp));
  if (lane == 0) open[warp] = list.count;
  named_arrive(kDoneBarrier, kDone);
  if (wanted.target == nullptr) return;
  // The second phase has found the codewords of the lists.
  named_wait(kOpenBarrier, kThreads + kGroupThreads);
  take_listed(list, packed, indices, take, lane);
  add_up_by_warp(take.error, wanted.error, warp, kGroupWarps);
}

}  // namespace
}  // namespace uefl::cuda
