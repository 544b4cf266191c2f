// Launches row_sums.h, for the ops that end with it.
#pragma once

#include "cuda/row_sums.h"
#include "ops/cuda/device.h"
#include "ops/cuda/stream.h"
#include "ops/cuda/tensors.h"

namespace uefl::cuda {

// parts(blocks) returns the memory for the parts of the error.
template <bool kGather, class T, class Codeword, class Parts>
void launch_row_sums(const char* op, const T* x, const Shape& shape, RowSums<T, Codeword> wanted,
                     const Parts& parts, cudaStream_t stream) {
  const int64_t blocks = divide_rows(wanted, shape, kSumBlocks * current_device().multiprocessors),
                bytes = sort_bytes(wanted, shape, kSumThreads);
  wanted.error.parts = parts(blocks);
  const auto kernel = row_sums<T, kGather, Codeword>;
  allow_shared(op, kernel, bytes);
  kernel<<<static_cast<unsigned>(blocks), kSumThreads, bytes, stream>>>(x, shape, wanted);
  check_launch(op);
}

}  // namespace uefl::cuda
