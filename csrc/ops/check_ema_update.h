// Checks the arguments of ema_update in a direct call of torch.ops, on the CPU and on a GPU.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "common/ema_update.h"

namespace uefl {

// The arguments as the kernels read them, and the results.
class EmaUpdateCall {
 public:
  using Tensor = torch::stable::Tensor;
  using ScalarType = torch::headeronly::ScalarType;
  using Results = std::tuple<Tensor, Tensor, Tensor>;

  EmaUpdateCall(const Tensor& sizes, const Tensor& averages, const Tensor& codewords, const Tensor& counts,
                const Tensor& sums, const std::optional<Tensor>& weights)
      : dtype_(averages.scalar_type()) {
    require(dtype_ == ScalarType::Float || dtype_ == ScalarType::Double,
            "averages must be float32 or float64");
    require(averages.dim() == 3, "averages must have shape [h, K, d]");
    const auto read = [&](const Tensor& tensor, ScalarType type, int64_t dim, const char* expected) {
      bool fits = tensor.scalar_type() == type && tensor.dim() == dim &&
                  tensor.is_cuda() == averages.is_cuda() &&
                  tensor.get_device_index() == averages.get_device_index();
      for (int64_t i = 0; fits && i < dim; ++i) fits = tensor.size(i) == averages.size(i);
      require(fits, expected);
      return torch::stable::contiguous(tensor);
    };
    sizes_ = read(sizes, dtype_, 2, "sizes must be [h, K], of the dtype and device of averages");
    averages_ = read(averages, dtype_, 3, "");
    codewords_ = read(codewords, dtype_, 3, "codewords must have the shape, dtype and device of averages");
    counts_ = read(counts, ScalarType::Long, 2, "counts must be int64 [h, K], on the device of averages");
    sums_ = read(sums, ScalarType::Double, 3, "sums must be float64 [h, K, d], on the device of averages");
    if (weights)
      weights_ = read(*weights, dtype_, 2, "weights must be [h, K], of the dtype and device of averages");
    results_ = {torch::stable::new_empty(sizes_, sizes_.sizes()),
                torch::stable::new_empty(averages_, averages_.sizes()),
                torch::stable::new_empty(codewords_, codewords_.sizes())};
  }

  const Results& results() const { return results_; }
  bool is_double() const { return dtype_ == ScalarType::Double; }

  template <class T>
  EmaUpdate<T> of(double step, double eps, bool unit) {
    const auto data = [](const Tensor& tensor) { return static_cast<const T*>(tensor.const_data_ptr()); };
    const auto out = [](Tensor& tensor) { return static_cast<T*>(tensor.mutable_data_ptr()); };
    const int64_t k = averages_.size(1);
    return {.codebooks = averages_.size(0),
            .k = k,
            .d = averages_.size(2),
            .sizes = data(sizes_),
            .averages = data(averages_),
            .codewords = data(codewords_),
            .counts = static_cast<const int64_t*>(counts_.const_data_ptr()),
            .sums = static_cast<const double*>(sums_.const_data_ptr()),
            .weights = weights_ ? data(*weights_) : nullptr,
            .step = static_cast<T>(step),
            .eps = static_cast<T>(eps),
            .all_eps = static_cast<T>(static_cast<double>(k) * eps),
            .unit = unit,
            .new_sizes = out(std::get<0>(results_)),
            .new_averages = out(std::get<1>(results_)),
            .new_codewords = out(std::get<2>(results_))};
  }

 private:
  static void require(bool condition, const char* expected) {
    if (!condition) throw std::runtime_error(std::string("ema_update: ") + expected);
  }

  ScalarType dtype_;
  Tensor sizes_, averages_, codewords_, counts_, sums_;
  std::optional<Tensor> weights_;
  Results results_;
};

}  // namespace uefl
