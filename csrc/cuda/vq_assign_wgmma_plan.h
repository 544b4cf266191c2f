// How the shared memory of a block of search_wgmma is divided, and for which rows that does.
#pragma once

#include <algorithm>

#include "cuda/hopper.h"
#include "cuda/vq_assign_scores.h"

namespace uefl::cuda {
namespace {

constexpr int kGroupThreads = 128, kGroupRows = 64, kStageRows = 16, kGroupLists = kGroupThreads / kWarp;
constexpr int kWgmmaColumns = kBlockCodes / 4, kBlockBytes = kBlockHalves * 2, kStartBytes = kStarts * sizeof(float);

// Beside kGroups warpgroups, one that copies: two warps the rows, one the codebook. Registers of a thread: what copies leave is for the
// others.
template <int kGroups>
struct Layout {
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kCompute = kGroups == 3 ? 152 : 224, kCopy = 56;
};

// How shared memory is divided: first the stages of the codebook, which begin at multiples of 1024 bytes, and then what else stands here
// with its offset. A kernel has it in constant memory, which saves the registers of as many pointers.
struct Stages {
  int groups = 0;            // warpgroups that multiply: 2 or 3
  int codes = 0, rows = 0;   // stages of the codebook; of the rows of each warpgroup
  bool resident = false;     // every block of the codebook has a stage of its own
  int row_bytes = 0;         // a row of x
  bool dense = false;        // rows lie side by side, without gaps
  int chunks = 0, size = 0;  // blocks of 64 elements in a row; bytes of shared memory
  // Fragments of rows that are too long for registers, of each warpgroup so many bytes; rows; starts of scores; lists of open rows;
  // barriers of the codes and of the rows, the full ones before the empty ones.
  int fragments_at = 0, fragment_bytes = 0, rows_at = 0, starts_at = 0, outputs_at = 0, limits_at = 0, codes_ready_at = 0,
      rows_ready_at = 0;

  // Every stage of rows is always of the same warp. Else a warp must see each phase of the barriers: they tell only two of them apart.
  UEFL_HOST_DEVICE bool of_one_warp() const { return rows % 4 == 0; }
};

// For rows of x that are copied 16 bytes at a time, with so many bytes of shared memory; rows = 0 where that does not do.
inline Stages divide(const Shape& shape, int groups, int64_t element_bytes, int64_t limit) {
  Stages stages;
  stages.groups = groups;
  stages.chunks = static_cast<int>((shape.d + kBlockElements - 1) / kBlockElements);
  const int64_t code_blocks = shape.books * (shape.padded_k / kBlockCodes) * stages.chunks, barriers = 2 * sizeof(Barrier);
  const int64_t fragments = stages.chunks > 1 ? stages.chunks * int64_t{kGroupRows * kBlockElements * 2} : 0;
  const int64_t fixed = groups * (fragments + kGroupLists * OpenRows::kBytes), stage_bytes = kStageRows * shape.d * element_bytes;
  const int64_t rows_stage = groups * (stage_bytes + barriers), codes_stage = kBlockBytes + kStartBytes + barriers;
  // A block multiplies for some 500 cycles, about what the next one takes to come: four in flight, and then a second stage of rows.
  for (int least_rows = 2; least_rows > 0 && stages.rows == 0; --least_rows) {
    const int64_t codes = std::min(code_blocks, (limit - fixed - least_rows * rows_stage) / codes_stage);
    if (codes < std::min<int64_t>(code_blocks, 2 * least_rows)) continue;
    int64_t rows = std::min<int64_t>(16, (limit - fixed - codes * codes_stage) / rows_stage);
    if (rows > 4) rows = rows / 4 * 4;
    stages.codes = static_cast<int>(codes), stages.rows = static_cast<int>(rows);
    stages.resident = codes == code_blocks;
    stages.row_bytes = static_cast<int>(shape.d * element_bytes);
    const bool one = shape.outputs / shape.segments <= shape.inner;  // no outer stride to take
    stages.dense = shape.books == 1 && shape.inner_stride == shape.segments * shape.d &&
                   (one || shape.outer_stride == shape.inner * shape.inner_stride);
    const auto take = [&](int64_t bytes) { return static_cast<int>((stages.size += static_cast<int>(bytes)) - bytes); };
    take(codes * kBlockBytes);
    stages.fragments_at = take(groups * fragments), stages.fragment_bytes = static_cast<int>(fragments);
    stages.rows_at = take(groups * rows * stage_bytes), stages.starts_at = take(codes * kStartBytes);
    stages.outputs_at = take(groups * kGroupLists * OpenRows::kRoom * sizeof(int64_t));
    stages.limits_at = take(groups * kGroupLists * OpenRows::kRoom * sizeof(float));
    stages.codes_ready_at = take(codes * barriers), stages.rows_ready_at = take(groups * rows * barriers);
  }
  return stages;
}

// Where rows can be copied in bulk: elements side by side, rows at multiples of 16 bytes.
inline bool rows_in_bulk(const Shape& shape, const void* x, int64_t element_bytes) {
  const auto whole = [&](int64_t elements) { return elements * element_bytes % 16 == 0; };
  return shape.stride == 1 && whole(shape.d) && whole(shape.inner_stride) && whole(shape.outer_stride) &&
         reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

}  // namespace
}  // namespace uefl::cuda
