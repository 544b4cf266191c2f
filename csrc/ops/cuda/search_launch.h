// The search on CUDA, for the ops that begin with it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>
#include <utility>

#include "cuda/sums.h"

namespace uefl::cuda {

// Returns the indices [..., S] of the nearest codewords, and true if the search has also computed the wanted
// results. One kind of search can do so while it has the rows. `op` is the name for error messages. The same
// launches clear the arrays to which the op adds.
std::pair<torch::stable::Tensor, bool> assign(const char* op, const torch::stable::Tensor& x,
                                              const torch::stable::Tensor& codebook,
                                              const std::string& metric, bool exact,
                                              const Spans& cleared = {}, Quantized wanted = {});

}  // namespace uefl::cuda
