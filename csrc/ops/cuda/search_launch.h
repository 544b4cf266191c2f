// The search on CUDA, for the ops that begin with one.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>
#include <utility>

#include "cuda/sums.h"

namespace uefl::cuda {

// Indices [..., S] of the nearest codewords, and whether what is wanted is there too: one kind of search
// makes it while it has the rows. op: who asks, for messages. The same launches clear the arrays that the op
// adds to.
std::pair<torch::stable::Tensor, bool> assign(const char* op, const torch::stable::Tensor& x,
                                              const torch::stable::Tensor& codebook,
                                              const std::string& metric, bool exact,
                                              const Spans& cleared = {}, Quantized wanted = {});

}  // namespace uefl::cuda
