// Checks a direct call of torch.ops before an MC-dropout kernel reads its pointers, on the CPU and on a GPU.
// The public function checks more (ops/mc_dropout_mlp/__init__.py).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/mc_dropout.h"

namespace uefl {

// Returns the threshold of a dropout rate. A unit is dropped if its 16 random bits are below the threshold.
// This has probability round(65536 p) / 65536, at most 65535 / 65536.
inline uint32_t dropout_threshold(double p) {
  return static_cast<uint32_t>(std::min(65535.0, std::nearbyint(p * 65536)));
}

// Returns the activation of a name that has passed the check.
inline McActivation activation_of(const std::string& name) {
  return name == "gelu"   ? McActivation::gelu
         : name == "relu" ? McActivation::relu
         : name == "silu" ? McActivation::silu
                          : McActivation::tanh;
}

namespace check {
inline void require(const char* op, bool condition, const char* expected) {
  if (!condition) throw std::runtime_error(std::string(op) + ": " + expected);
}
inline bool is_rate(double p) { return p >= 0 && p < 1; }
inline bool is_word(int64_t value) { return value >= 0 && value <= INT64_C(0xffffffff); }
inline bool is_seed(const torch::stable::Tensor& seed) {
  return seed.dim() == 0 && seed.scalar_type() == torch::headeronly::ScalarType::Long;
}
}  // namespace check

inline void check_mc_dropout(const torch::stable::Tensor& x, const torch::stable::Tensor& parameters,
                             const std::vector<int64_t>& widths, const std::vector<double>& p, int64_t passes,
                             const std::string& activation, const torch::stable::Tensor& seed) {
  using torch::headeronly::ScalarType;
  const auto require = [](bool condition, const char* expected) {
    check::require("mc_dropout_mlp", condition, expected);
  };
  const ScalarType type = x.scalar_type();
  require(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
          "x must be float32, bfloat16 or float16; use backend 'reference' for float64");
  require(parameters.scalar_type() == ScalarType::Float, "parameters must be float32");
  require(check::is_seed(seed), "seed must be an int64 tensor without dimensions");
  for (const torch::stable::Tensor& tensor : {parameters, seed}) {
    require(x.is_cpu() == tensor.is_cpu() && x.is_cuda() == tensor.is_cuda() &&
                x.get_device_index() == tensor.get_device_index(),
            "x, parameters and seed must be on the same device");
  }
  require(!widths.empty() && p.size() == widths.size(), "widths and p must have the same length, at least 1");
  require(std::all_of(widths.begin(), widths.end(),
                      [](int64_t width) { return width >= 1 && width <= INT32_MAX; }),
          "widths must be from 1 to 2^31 - 1");
  require(x.dim() == 2 && x.size(1) == widths[0], "x must have shape [B, widths[0]]");
  require(check::is_word(x.size(0)), "x must have fewer than 2^32 rows; call the op for parts of x");
  int64_t expected = 0;
  for (size_t i = 1; i < widths.size(); ++i) expected += widths[i] * (widths[i - 1] + 1);
  require(parameters.dim() == 1 && parameters.numel() == expected,
          "parameters must be one vector of the weights and the bias of each layer of these widths");
  require(std::all_of(p.begin(), p.end(), check::is_rate), "p must be in [0, 1)");
  require(passes >= 1 && check::is_word(passes), "passes must be in [1, 2^32)");
  require(activation == "gelu" || activation == "relu" || activation == "silu" || activation == "tanh",
          "activation must be 'gelu', 'relu', 'silu' or 'tanh'");
}

inline void check_dropout_mask(const torch::stable::Tensor& seed, int64_t rows, int64_t columns, int64_t pass,
                               int64_t stream, double p) {
  const auto require = [](bool condition, const char* expected) {
    check::require("dropout_mask", condition, expected);
  };
  require(check::is_seed(seed), "seed must be an int64 tensor without dimensions");
  require(check::is_word(rows) && check::is_word(columns), "rows and columns must be in [0, 2^32)");
  require(check::is_word(pass) && check::is_word(stream), "pass and stream must be in [0, 2^32)");
  require(check::is_rate(p), "p must be in [0, 1)");
}

}  // namespace uefl
