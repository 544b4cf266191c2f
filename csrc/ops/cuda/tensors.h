// The parts that the ops on CUDA share: element types, x as rows, and the device of the tensors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>

#include "cuda/rows.h"
#include "cuda/sums.h"
#include "ops/check_search.h"
#include "ops/cuda/stream.h"

namespace uefl::cuda {

// Calls body with a value of the element type.
template <class Body>
void with_type(torch::headeronly::ScalarType type, const Body& body) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::Half:
      return body(__half{});
    default:  // the checks of the ops have refused other dtypes
      return body(__nv_bfloat16{});
  }
}

// Returns x as [outer, inner, D]. The result is a view of dense, channels-first and transposed layouts, and a
// copy of layouts that two strides cannot describe. The result also replaces x.
inline Shape shape_of(torch::stable::Tensor& x, const SearchSizes& sizes) {
  if (x.dim() > 2) x = torch::stable::flatten(x, 1, -2);
  const int64_t last = x.dim() - 1;
  Shape shape{};
  shape.outputs = x.numel() / sizes.d;
  shape.segments = sizes.segments, shape.codebooks = sizes.codebooks, shape.d = sizes.d, shape.k = sizes.k;
  shape.inner = last > 0 ? x.size(last - 1) : 1;
  shape.inner_stride = last > 0 ? x.stride(last - 1) : 0;
  shape.outer_stride = last > 1 ? x.stride(0) : 0;
  shape.stride = x.stride(last);
  return shape;
}

// Returns the spans of tensors with elements of 8 bytes. The kernel that packs the codebook zeroes them.
inline Spans spans_of(std::initializer_list<torch::stable::Tensor*> tensors) {
  Spans spans{};
  int64_t i = 0;
  for (torch::stable::Tensor* tensor : tensors) {
    spans.begin[i] = static_cast<long long*>(tensor->mutable_data_ptr());
    spans.size[i++] = tensor->numel();
  }
  return spans;
}

}  // namespace uefl::cuda
