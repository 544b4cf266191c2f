// Rows of logits in float64 for the definitions, and the kernels of the instruction set in use.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/softmax_kernel.h"

namespace uefl::cpu {

const SoftmaxKernel& softmax_kernel();

// Returns row n of the logits.
std::vector<double> read_row(const StridedRows& logits, int64_t n);

// Writes row n of a dense array of the dtype.
void write_row(const std::vector<double>& values, Dtype dtype, void* to, int64_t n);

}  // namespace uefl::cpu
