// Launches the kernels of vq_backward_kernels.h, and registers the op with torch.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "cuda/vq_backward_kernels.h"
#include "ops/check_backward.h"
#include "ops/check_search.h"
#include "ops/cuda/register.h"
#include "ops/cuda/stream.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Describes a tensor as [outer, inner, D]. Replaces the tensor by a copy if two strides cannot describe its
// layout.
View view(Tensor& tensor) {
  if (tensor.dim() > 2) tensor = torch::stable::flatten(tensor, 1, -2);
  const int64_t last = tensor.dim() - 1;
  const int64_t inner = last > 0 ? tensor.size(last - 1) : 1,
                inner_stride = last > 0 ? tensor.stride(last - 1) : 0;
  return {inner, last > 1 ? tensor.stride(0) : inner * inner_stride, inner_stride, tensor.stride(last)};
}

template <class T>
bool in_fours(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Four<T>) == 0;
}

template <class T, class Wide>
void launch(const Tensor& x, const Tensor& codewords, const Tensor& indices, const std::optional<Tensor>& g,
            const Tensor& pull, const BackwardShape& shape, Tensor& out) {
  const Tensor doubled = torch::stable::to(pull, ScalarType::Double);
  const T *from = static_cast<const T*>(x.const_data_ptr()),
          *gradient = g ? static_cast<const T*>(g->const_data_ptr()) : nullptr;
  const auto* codebook_data = static_cast<const Wide*>(codewords.const_data_ptr());
  const auto* chosen = static_cast<const int64_t*>(indices.const_data_ptr());
  const auto* strength = static_cast<const double*>(doubled.const_data_ptr());
  T* const target = static_cast<T*>(out.mutable_data_ptr());
  const auto blocks = [](int64_t threads) {
    return static_cast<unsigned>(std::min<int64_t>((threads + kThreads - 1) / kThreads, 0x7fffffff));
  };
  if constexpr (std::is_same_v<Wide, float>) {
    const bool dense =
        x.is_contiguous() && out.is_contiguous() && (!g || g->is_contiguous()) && shape.d % 4 == 0;
    if (dense && in_fours(from) && in_fours(gradient) && in_fours(codebook_data) && in_fours(target)) {
      backward_dense<<<blocks(shape.outputs * (shape.d / 4)), kThreads, 0, current_stream(x)>>>(
          reinterpret_cast<const Four<T>*>(from), reinterpret_cast<const Four<float>*>(codebook_data), chosen,
          reinterpret_cast<const Four<T>*>(gradient), strength, shape, reinterpret_cast<Four<T>*>(target));
      return check_launch("vq_backward");
    }
  }
  backward<<<blocks(shape.outputs * kWarp), kThreads, 0, current_stream(x)>>>(
      from, codebook_data, chosen, gradient, strength, shape, target);
  check_launch("vq_backward");
}

Tensor vq_backward(const Tensor& x, const Tensor& codebook, const Tensor& indices,
                   std::optional<Tensor> grad_quantized, const Tensor& pull, bool rotation) {
  const SearchSizes sizes = check_search("vq_backward", x, codebook, "l2");
  check_backward(x, indices, grad_quantized ? &*grad_quantized : nullptr, pull, sizes);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor grad_x = torch::stable::empty_like(x), rows = x, out = grad_x;
  const bool rotated = rotation && grad_quantized;
  const bool wide =
      rotated || x.scalar_type() == ScalarType::Double || codebook.scalar_type() == ScalarType::Double;
  BackwardShape shape{.outputs = indices.numel(),
                      .segments = sizes.segments,
                      .codebooks = sizes.codebooks,
                      .k = sizes.k,
                      .d = sizes.d,
                      .x = view(rows),
                      .g = {},
                      .out = view(out),
                      .rotation = rotated};
  if (shape.outputs == 0) return grad_x;
  if (grad_quantized) shape.g = view(*grad_quantized);
  const Tensor chosen = torch::stable::contiguous(indices);
  const Tensor codewords =
      torch::stable::contiguous(torch::stable::to(codebook, wide ? ScalarType::Double : ScalarType::Float));
  const auto with = [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == sizeof(double)) {
      launch<T, double>(rows, codewords, chosen, grad_quantized, pull, shape, out);
    } else {
      (wide ? launch<T, double> : launch<T, float>)(rows, codewords, chosen, grad_quantized, pull, shape,
                                                    out);
    }
  };
  switch (x.scalar_type()) {
    case ScalarType::Float:
      with(float{});
      break;
    case ScalarType::Double:
      with(double{});
      break;
    case ScalarType::Half:
      with(__half{});
      break;
    default:  // check_search has rejected other dtypes
      with(__nv_bfloat16{});
  }
  if (out.const_data_ptr() != grad_x.const_data_ptr())
    torch::stable::copy_(grad_x, torch::stable::reshape(out, grad_x.sizes()));
  return grad_x;
}

}  // namespace
}  // namespace uefl::cuda

UEFL_CUDA_OP("vq_backward", TORCH_BOX(&uefl::cuda::vq_backward))
