// vq_forward on CUDA: a search, then one pass over x (vq_gather.h; row_sums.h where sums are wanted).
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "cuda/vq_gather.h"
#include "ops/check_search.h"
#include "ops/cuda/device.h"
#include "ops/cuda/row_sums_launch.h"
#include "ops/cuda/stream.h"
#include "ops/cuda/tensors.h"
#include "ops/cuda/vq_assign.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Returns true if all pieces of this number of bytes are aligned to it.
bool in_pieces(const void* x, const Shape& shape, int64_t element_bytes, const void* codes) {
  const int64_t piece = 16 / element_bytes;
  return reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(codes) % 16 == 0 &&
         shape.stride == 1 && shape.d % piece == 0 && shape.inner_stride % piece == 0 &&
         shape.outer_stride % piece == 0;
}

template <class T, class Code, class Parts>
void launch_gather(const T* x, const Shape& shape, Gather<T, Code> wanted, const Parts& parts,
                   cudaStream_t stream) {
  const auto launch = [&](auto kernel, int piece) {
    const int64_t blocks =
        divide_rows(wanted, shape, piece, kGatherBlocks * current_device().multiprocessors);
    wanted.error.parts = parts(blocks);
    const int64_t bytes = wanted.in_counters ? sizeof(int) * shape.books * shape.k : 0;
    kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(x, shape, wanted);
    check_launch("vq_forward");
  };
  if constexpr (sizeof(T) < sizeof(double) && sizeof(Code) < sizeof(double)) {
    if (in_pieces(x, shape, sizeof(T), wanted.codes))
      return launch(gather<T, Code, kPieceOf<T>>, kPieceOf<T>);
  }
  launch(gather<T, Code, 1>, 1);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> vq_forward(const Tensor& x, const Tensor& codebook,
                                                                      std::optional<Tensor> scales,
                                                                      std::string metric, bool exact) {
  const SearchSizes sizes = check_search("vq_forward", x, codebook, metric);
  const int64_t codes = sizes.books * sizes.k, with_sums = scales ? codes : 0;
  STD_TORCH_CHECK(
      !scales || (scales->is_cuda() && scales->get_device_index() == x.get_device_index() &&
                  scales->scalar_type() == ScalarType::Double && scales->numel() == codes &&
                  scales->is_contiguous()),
      "vq_forward: scales must be float64, contiguous, one for each codeword, on the device of x");
  STD_TORCH_CHECK(codes <= INT32_MAX && sizes.d <= INT32_MAX / kWarp,
                  "vq_forward: the codebook is too large");  // a tile has kWarp rows
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const bool wide = codebook.scalar_type() == ScalarType::Double;
  const Tensor codewords =
      torch::stable::contiguous(torch::stable::to(codebook, wide ? ScalarType::Double : ScalarType::Float));
  Tensor quantized = torch::stable::new_empty(x, x.sizes()), rows = x, parts;
  Tensor error = torch::stable::new_empty(x, {}, ScalarType::Double),
         done = torch::stable::new_empty(x, {1}, ScalarType::Long);
  Tensor counts = torch::stable::new_empty(x, {codes}, ScalarType::Long);
  Tensor largest = torch::stable::new_empty(x, {with_sums}, ScalarType::Long);
  Tensor sums = torch::stable::new_empty(x, {with_sums, sizes.d}, ScalarType::Long);
  const Spans cleared = spans_of({&counts, &largest, &sums, &error, &done});
  const Tensor indices = assign("vq_forward", x, codebook, metric, exact, cleared);
  const Shape shape = shape_of(rows, sizes);
  if (shape.outputs == 0) return {quantized, indices, error, counts, largest, sums};

  const auto numbers = [](Tensor& tensor) { return static_cast<long long*>(tensor.mutable_data_ptr()); };
  const auto room = [&](int64_t blocks) {
    parts = torch::stable::new_empty(x, {blocks}, ScalarType::Double);
    return static_cast<double*>(parts.mutable_data_ptr());
  };
  const Total total{static_cast<double*>(error.mutable_data_ptr()), nullptr, numbers(done)};
  const auto launch = [&](auto type, auto code) {
    using T = decltype(type);
    using Code = decltype(code);
    const T* data = static_cast<const T*>(rows.const_data_ptr());
    const Code* table = static_cast<const Code*>(codewords.const_data_ptr());
    const int64_t* chosen = static_cast<const int64_t*>(indices.const_data_ptr());
    T* target = static_cast<T*>(quantized.mutable_data_ptr());
    if (!scales) {
      return launch_gather(data, shape,
                           Gather<T, Code>{table, chosen, target, numbers(counts), total, 0, 0, false}, room,
                           stream);
    }
    RowSums<T, Code> wanted{};
    wanted.indices = chosen, wanted.counts = numbers(counts), wanted.sums = numbers(sums),
    wanted.largest = numbers(largest);
    wanted.scales = static_cast<const double*>(scales->const_data_ptr());
    wanted.codes = table, wanted.quantized = target, wanted.error = total;
    launch_row_sums<true>("vq_forward", data, shape, wanted, room, stream);
  };
  with_type(rows.scalar_type(), [&](auto type) { wide ? launch(type, double{}) : launch(type, float{}); });
  return {quantized, indices, error, counts, largest, sums};
}

}  // namespace
}  // namespace uefl::cuda

STABLE_TORCH_LIBRARY_IMPL(uefl_cuda, CUDA, m) { m.impl("vq_forward", TORCH_BOX(&uefl::cuda::vq_forward)); }
