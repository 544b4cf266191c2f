// The search on CUDA, for the ops that begin with it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "cuda/sums.h"

namespace uefl::cuda {

// Returns the indices [..., S] of the nearest codewords. `op` is the name for error messages. The same
// launches clear the arrays to which the op adds.
torch::stable::Tensor assign(const char* op, const torch::stable::Tensor& x,
                             const torch::stable::Tensor& codebook, const std::string& metric, bool exact,
                             const Spans& cleared = {});

}  // namespace uefl::cuda
