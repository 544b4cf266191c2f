// vq_assign on sm_90a: one thread block on each multiprocessor for the whole search. The tests also run it on
// the CPU, with its barriers, copies and layouts of shared memory. The warps of a thread block have roles,
// with rings of barriers between them:
//
//   prepare   One or two warpgroups read rows of x and convert them to float16 tiles in the layout of the
//             products. They also measure the length of each row and its rounding error. Only this role
//             knows the type and the strides of x. (vq_assign_wgmma_prepare.h)
//   multiply  Two or three warpgroups multiply 64 rows each with 128 codewords at a time, and keep the two
//             least scores of each lane. (this file)
//   finish    Four warps merge the results of the lanes of a row, certify them, and write. One thread of them
//             copies the codebook: once if it fits, otherwise a block of codewords whenever a place of the
//             ring is free. (vq_assign_wgmma_finish.h)
//
// At the end, two multiplying warpgroups decide the rows that are open between more than two codewords. The
// warpgroups that do not multiply decide the rows that are open only between two codewords.
//
// The copies of the codebook are bulk copies of one dimension, because the codebook is packed in the layout
// of the products. So no tensor map has to be encoded, passed on and kept valid in a graph.
#pragma once

#include "cuda/vq_assign_wgmma_finish.h"
#include "cuda/vq_assign_wgmma_prepare.h"

namespace uefl::cuda {
namespace {

// Keeps the best and the second-best score of two rows with 128 codewords.
__device__ inline void compare(const float (&dot)[64], const Four<float>& early, const float* starts,
                               float down, int shift, int tile, TileTopTwo (&top)[2]) {
  int packed[2][kWgmmaColumns];
  UEFL_UNROLL
  for (int c = 0; c < kWgmmaColumns; c += 4) {
    const Four<float> start = c == 0 ? early : load_four(starts + c);
    UEFL_UNROLL
    for (int r = 0; r < 2; ++r) {
      UEFL_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float score = fmaf(-dot[2 * (c + e) - e % 2 + 2 * r], down, start.values[e]);
        packed[r][c + e] = pack(score, c + e, shift);
      }
    }
  }
  UEFL_UNROLL
  for (int r = 0; r < 2; ++r) top[r].add(packed[r], tile);
}

// Multiplies 64 rows with a block of codewords, 64 elements of each.
__device__ inline void multiply_chunk(float (&dot)[64], const uint32_t (&fragment)[4][4], Operand codewords) {
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) multiply_group(dot, fragment[i], codewords + i * kOperandStep, i > 0);
  warpgroup_commit();
}
__device__ inline void multiply_chunk(float (&dot)[64], Operand rows, Operand codewords, bool add) {
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i)
    multiply_group(dot, rows + i * kOperandStep, codewords + i * kOperandStep, add || i > 0);
  warpgroup_commit();
}

// The ring of codewords as a warpgroup reads it. Values that are computed once stay in registers. Otherwise
// the compiler would compute the addresses again for every block.
struct CodewordPlaces {
  Ring ring;
  Barrier *first_full, *first_empty;
  const float* first_starts;  // of the columns of this lane
  Operand first_operand;

  __device__ CodewordPlaces(const WgmmaPlan& plan, const WgmmaMemory& memory)
      : ring{plan.codewords},
        first_full(kept_shared(memory.codewords_full(0))),
        first_empty(kept_shared(memory.codewords_empty(0))),
        first_starts(kept_shared(memory.starts(0) + threadIdx.x % 4 * (kStarts / 4))),
        first_operand(operand(kept_shared(memory.codewords(0)))) {}
  __device__ void wait() const { barrier_wait(first_full + ring.place, ring.parity); }
  __device__ void release(int place) const { barrier_arrive_by_warp(first_empty + place); }
  // The shuffle tells the compiler that all lanes have this value. It then uses registers that a warp shares.
  __device__ Operand block() const {
    const Operand here = first_operand + static_cast<unsigned>(ring.place) * (kBlockBytes >> 4);
    return {__shfl_sync(kAllLanes, here.low, 0)};
  }
  __device__ const float* starts(int place) const { return first_starts + place * kStarts; }
};

// A warp of a multiplying warpgroup. kLong: rows have more than one chunk, and the products read them from
// shared memory. Shorter rows stay in registers.
template <int kGroups, bool kLong>
struct Multiplier {
  const PackedCodebook& packed;
  const WgmmaPlan& plan;
  const WgmmaMemory& memory;
  int code_tiles, chunks;
  CodewordPlaces codewords;
  Ring tiles;

  __device__ Multiplier(const PackedCodebook& of, const WgmmaPlan& of_call, const WgmmaMemory& shared)
      : packed(of),
        plan(of_call),
        memory(shared),
        code_tiles(plan.items.code_tiles),
        chunks(kLong ? plan.chunks : 1),
        codewords(plan, shared),
        tiles{plan.tiles} {
    tiles.advance(group());
  }

  // Returns the number of this warpgroup. It is computed at each use, so it takes no register in between.
  __device__ static int group() { return static_cast<int>(threadIdx.x / kGroupThreads) - 1; }

  // Releases the codewords of the last round, if this warpgroup has no rows in this round.
  __device__ void pass() {
    for (int code_tile = 0; code_tile < code_tiles; ++code_tile) {
      for (int chunk = 0; chunk < chunks; ++chunk, codewords.ring.advance()) {
        codewords.wait();
        codewords.release(codewords.ring.place);
      }
    }
  }

  // Loads short rows as the left operand.
  __device__ void load_rows(uint32_t (&fragment)[4][4]) const {
    const int row = threadIdx.x / kWarp % kGroupWarps * kWarpRows + threadIdx.x % kWarpRows,
              half = threadIdx.x / kWarpRows % 2;
    const unsigned char* from = memory.tile(tiles.place, 0) + row * (kBlockElements * 2);
    UEFL_UNROLL
    for (int i = 0; i < 4; ++i) load_matrices(fragment[i], from + ((2 * i + half) ^ row % 8) * 16);
    barrier_arrive_by_warp(memory.tile_free(tiles.place, 0));
  }

  // Multiplies long rows with a tile of codewords. The products of the last chunk are still under way at the
  // end. Returns the place of its codewords.
  __device__ int multiply_chunks(float (&dot)[64], int code_tile) {
    int last = codewords.ring.place;  // the block that is being multiplied
    multiply_chunk(dot, operand(memory.tile(tiles.place, 0)), codewords.block(), false);
    codewords.ring.advance();
    for (int chunk = 1; chunk < chunks; ++chunk, codewords.ring.advance()) {
      if (code_tile == 0) barrier_wait(memory.tile_ready(tiles.place, chunk), tiles.parity);
      codewords.wait();
      warpgroup_arrive();
      multiply_chunk(dot, operand(memory.tile(tiles.place, chunk)), codewords.block(), true);
      warpgroup_wait<1>();
      codewords.release(last);
      if (code_tile + 1 == code_tiles) barrier_arrive_by_warp(memory.tile_free(tiles.place, chunk - 1));
      last = codewords.ring.place;
    }
    return last;
  }

  // Finds the best and the second-best score of two rows of a lane with all codewords of a codebook.
  __device__ void multiply_item(float down, TileTopTwo (&top)[2]) {
    uint32_t fragment[4][4];
    barrier_wait(memory.tile_ready(tiles.place, 0), tiles.parity);
    if constexpr (!kLong) load_rows(fragment);
    float dot[64];
    for (int code_tile = 0; code_tile < code_tiles; ++code_tile) {
      codewords.wait();
      warpgroup_fence_registers(dot);
      warpgroup_arrive();
      int last = codewords.ring.place;
      if constexpr (kLong) {
        last = multiply_chunks(dot, code_tile);
      } else {
        multiply_chunk(dot, fragment, codewords.block());
      }
      const float* starts = codewords.starts(last);
      const Four<float> early = load_four(starts);  // while the products run
      warpgroup_wait<0>();
      warpgroup_fence_registers(dot);
      if (kLong && code_tile + 1 == code_tiles)
        barrier_arrive_by_warp(memory.tile_free(tiles.place, chunks - 1));
      compare(dot, early, starts, down, packed.shift, code_tile, top);
      codewords.release(last);
      if (!kLong) codewords.ring.advance();
    }
  }

  __device__ void run(const Shape& shape, bool halves) {
    const int warp = threadIdx.x / kWarp % kGroupWarps, lane = threadIdx.x % kWarp;
    const int items = plan.items.number(blockIdx.x), rounds = plan.items.rounds(blockIdx.x);
    float down = 0;
    for (int round = 0; round < rounds; ++round, tiles.advance(kGroups)) {
      const int codebook = plan.items.codebook(blockIdx.x, round);
      if (round == 0 || shape.codebooks > 1) down = RowScale(shape, packed, codebook, halves).down;
      if (plan.resident) codewords.ring.place = codebook * code_tiles * chunks, codewords.ring.parity = 0;
      if (round * kGroups + group() >= items) {
        pass();
        break;
      }
      TileTopTwo top[2];
      multiply_item(down, top);
      UEFL_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = warp * kWarpRows + lane / 4 + 8 * r;
        memory.slot(tiles.place)->found[row][lane % 4] = {top[r].found, top[r].tile, 0};
      }
      barrier_arrive_by_warp(memory.found(tiles.place));
    }
    // Waits until all copies have arrived, also copies of codebooks that this thread block has not used.
    for (int block = 0; plan.resident && block < plan.codewords; ++block)
      barrier_wait(memory.codewords_full(block), 0);
  }
};

template <class T, int kGroups, bool kLong>
__global__ void __launch_bounds__(WgmmaRoles<kGroups, kLong>::kThreads, 1)
    search_wgmma(const T* x, const __grid_constant__ Shape shape,
                 const __grid_constant__ PackedCodebook packed, const __grid_constant__ WgmmaPlan plan,
                 bool exact, int64_t* indices) {
#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Roles = WgmmaRoles<kGroups, kLong>;
  const WgmmaMemory memory{plan};
  // The shuffle tells the compiler that the number of the warp is the same in all lanes.
  const int role = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kGroupThreads), 0);
  __shared__ int open[kGroupWarps], few[kGroupWarps];  // rows on the lists of the finishing warps
  if (threadIdx.x == 0) memory.make_barriers(kGroups * kGroupWarps), fence_barrier_init();
  __syncthreads();
  // At the end, the warps that do not multiply decide one kind of open rows, and two warpgroups that multiply
  // decide the other kind. Then the lists are complete, and the memory is free.
  const auto decide_rows = [&] {
    named_wait(kDoneBarrier, Roles::kThreads);
    const int warp = static_cast<int>(threadIdx.x / kWarp),
              team_warp = warp < kGroupWarps ? warp : warp - kGroups * kGroupWarps;
    decide_pairs<kLong>(x, shape, packed, plan, few, team_warp, (Roles::kPreparers + 1) * kGroupWarps,
                        indices);
  };
  if (role == 0 || role == kGroups + 2) {
    warpgroup_reg_dealloc<Roles::kPrepare>();
    const int which = Roles::kPreparers == 1 || role == 0 ? 0 : 1;
    prepare<T, kLong, Roles::kPreparers>(x, shape, packed, plan, memory, which);
    decide_rows();
  } else if (role <= kGroups) {
    warpgroup_reg_alloc<Roles::kMultiply>();
    Multiplier<kGroups, kLong>(packed, plan, memory).run(shape, is_half(T{}));
    if (threadIdx.x >= 3 * kGroupThreads) return named_arrive(kDoneBarrier, Roles::kThreads);
    named_wait(kDoneBarrier, Roles::kThreads);
    search_open<false>(x, shape, packed, OpenLists(packed, open, kGroupWarps, plan.room), indices);
  } else {
    warpgroup_reg_dealloc<Roles::kFinish>();
    finish<T>(shape, packed, plan, memory, exact, indices, open, few);
    decide_rows();
  }
#else
  asm("trap;");  // the host launches this kernel on sm_90 only
#endif
}

}  // namespace
}  // namespace uefl::cuda
