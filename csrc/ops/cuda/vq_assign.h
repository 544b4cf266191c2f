// The search on CUDA, for the ops that begin with one.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

namespace uefl::cuda {

// Indices [..., S] of the nearest codewords; op: who asks, for messages.
torch::stable::Tensor assign(const char* op, const torch::stable::Tensor& x, const torch::stable::Tensor& codebook,
                             const std::string& metric, bool exact);

}  // namespace uefl::cuda
