// The search on CUDA, for the ops that begin with one.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "cuda/sums.h"

namespace uefl::cuda {

// Indices [..., S] of the nearest codewords; op: who asks, for messages. What later kernels of the op add to
// is zeroed on the way.
torch::stable::Tensor assign(const char* op, const torch::stable::Tensor& x,
                             const torch::stable::Tensor& codebook, const std::string& metric, bool exact,
                             const Spans& cleared = {});

}  // namespace uefl::cuda
