// The search on CUDA, for the ops that begin with one.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <string>

#include "cuda/tail.h"

namespace uefl::cuda {

// What is to follow, in arrays that the caller owns; asked for once the sizes are known, and not when there are no rows.
using Follow = std::function<Tail(const Shape&)>;

// Indices [..., S] of the nearest codewords; op: who asks, for messages.
torch::stable::Tensor assign(const char* op, const torch::stable::Tensor& x, const torch::stable::Tensor& codebook,
                             const std::string& metric, bool exact, const Follow& follow);

}  // namespace uefl::cuda
