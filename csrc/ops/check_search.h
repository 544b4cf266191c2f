// Checks a direct call of torch.ops before a search kernel reads its pointers, on the CPU and on a GPU. The
// public functions check more (uefl_kernels/_checks.py).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace uefl {

// The sizes of a valid search: x [..., segments * d], codebook [k, d] (codebooks = 1) or [codebooks, k, d]
// with codebooks = segments.
struct SearchSizes {
  int64_t codebooks, k, d, segments;
};

inline SearchSizes check_search(const std::string& op, const torch::stable::Tensor& x,
                                const torch::stable::Tensor& codebook, const std::string& metric) {
  using torch::headeronly::ScalarType;
  const auto require = [&](bool condition, const char* expected) {
    if (!condition) throw std::runtime_error(op + ": " + expected);
  };
  for (const torch::stable::Tensor& tensor : {x, codebook}) {
    const ScalarType type = tensor.scalar_type();
    require(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half ||
                type == ScalarType::Double,
            "x and codebook must be float32, bfloat16, float16 or float64");
  }
  // The dispatcher guarantees the device of one of the two; this check makes both equal.
  require(x.is_cpu() == codebook.is_cpu() && x.is_cuda() == codebook.is_cuda() &&
              x.get_device_index() == codebook.get_device_index(),
          "x and codebook must be on the same device");
  require(x.dim() >= 1, "x must have shape [..., D]");
  require(codebook.dim() == 2 || codebook.dim() == 3, "codebook must have shape [K, d] or [S, K, d]");
  require(codebook.numel() > 0, "codebook must have at least one codeword of one element");
  require(metric == "l2" || metric == "cosine", "metric must be 'l2' or 'cosine'");
  const bool shared = codebook.dim() == 2;
  const int64_t dim = x.size(-1), d = codebook.size(-1), codebooks = shared ? 1 : codebook.size(0);
  require(!shared || (dim > 0 && dim % d == 0), "D of x must be a multiple of d for codebook [K, d]");
  require(shared || codebooks * d == dim, "D of x must be S * d for codebook [S, K, d]");
  return {codebooks, codebook.size(-2), d, dim / d};
}

}  // namespace uefl
