// Launches of vq_assign_kernels.h, and what torch sees of them.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/check_search.h"
#include "cuda/stream.h"
#include "cuda/vq_assign_kernels.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Blocks for so many threads, within the limit of a grid: the kernels with a thread per element of x loop.
unsigned blocks(int64_t threads) { return static_cast<unsigned>(std::min((threads + kThreads - 1) / kThreads, int64_t{0x7fffffff})); }

// Calls body with a value of the element type.
template <class Body>
void with_type(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::Half:
      return body(__half{});
    default:  // check_search has seen the others off
      return body(__nv_bfloat16{});
  }
}

// Divides one allocation into the arrays of Packed, the doubles first, so that everything is aligned.
Packed carve(const Shape& shape, const Tensor& x, Tensor& workspace) {
  const int64_t codes = shape.books * shape.d * shape.padded_k, norms = shape.books * shape.padded_k, means = shape.books * shape.d;
  const int64_t bytes = (codes + 2 * shape.books) * sizeof(double) + (codes + norms + means) * sizeof(float);
  workspace = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  Packed packed{};
  packed.exact = static_cast<double*>(workspace.mutable_data_ptr());
  packed.bounds = packed.exact + codes;
  packed.codes = reinterpret_cast<float*>(packed.bounds + 2 * shape.books);
  packed.half_norms = packed.codes + codes;
  packed.mean = packed.half_norms + norms;
  return packed;
}

Tensor vq_assign(const Tensor& x, const Tensor& codebook, std::string metric, bool exact) {
  const SearchSizes given = check_search("vq_assign", x, codebook, metric);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);

  Shape shape{};
  shape.books = given.books;
  shape.k = given.k;
  shape.d = given.d;
  shape.padded_k = (shape.k + kCodes - 1) / kCodes * kCodes;
  shape.segments = given.segments;
  shape.euclidean = metric == "l2";
  STD_TORCH_CHECK(shape.padded_k <= 0x7fffffff, "vq_assign: the codebook has ", shape.k, " codewords, expected fewer than 2^31 - 64");

  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = shape.segments;
  Tensor indices = torch::stable::new_empty(x, sizes, ScalarType::Long);
  shape.outputs = indices.numel();
  if (shape.outputs == 0) return indices;

  // [outer, inner, D]: a view of dense, channels-first and transposed layouts alike, a copy of what two strides cannot describe.
  const Tensor rows = x.dim() > 2 ? torch::stable::flatten(x, 1, -2) : x;
  const int64_t last = rows.dim() - 1;
  shape.inner = last > 0 ? rows.size(last - 1) : 1;
  shape.inner_stride = last > 0 ? rows.stride(last - 1) : 0;
  shape.outer_stride = last > 1 ? rows.stride(0) : 0;
  shape.stride = rows.stride(last);

  const Tensor dense = torch::stable::contiguous(codebook);
  Tensor workspace;
  const Packed packed = carve(shape, x, workspace);
  with_type(dense.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(dense.const_data_ptr());
    pack_exact<<<blocks(shape.books * shape.k * kWarp), kThreads, 0, stream>>>(data, shape, packed);
  });
  pack_centred<<<blocks(shape.books * shape.d * kWarp), kThreads, 0, stream>>>(shape, packed);
  pack_norms<<<blocks(shape.books * shape.padded_k), kThreads, 0, stream>>>(shape, packed);
  check_launch("vq_assign (pack)");

  int64_t* target = static_cast<int64_t*>(indices.mutable_data_ptr());
  const int64_t count = shape.outputs / shape.books, tiles = (count + kRows - 1) / kRows * shape.books;
  with_type(rows.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(rows.const_data_ptr());
    search<<<blocks(tiles * kThreads), kThreads, 0, stream>>>(data, shape, packed, exact, target);
    if (exact) rescore<<<blocks(shape.outputs), kThreads, 0, stream>>>(data, shape, packed, target);
  });
  check_launch("vq_assign");
  return indices;
}

}  // namespace
}  // namespace uefl::cuda

STABLE_TORCH_LIBRARY_IMPL(uefl_cuda, CUDA, m) { m.impl("vq_assign", TORCH_BOX(&uefl::cuda::vq_assign)); }
