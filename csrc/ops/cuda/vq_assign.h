// The search on CUDA, for the ops that begin with one.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "cuda/sums.h"

namespace uefl::cuda {

// Indices [..., S] of the nearest codewords; op: who asks, for messages. The same launches clear the arrays
// that later kernels of the op add to.
torch::stable::Tensor assign(const char* op, const torch::stable::Tensor& x,
                             const torch::stable::Tensor& codebook, const std::string& metric, bool exact,
                             const Spans& cleared = {});

}  // namespace uefl::cuda
