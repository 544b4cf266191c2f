// vq and vq_forward on CUDA. The search also quantizes the rows if it can. Otherwise one more pass over x
// quantizes them (vq_gather.h, or row_sums.h for sums).
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>
#include <vector>

#include "cuda/vq_gather.h"
#include "ops/check_search.h"
#include "ops/cuda/device.h"
#include "ops/cuda/register.h"
#include "ops/cuda/row_sums_launch.h"
#include "ops/cuda/search_launch.h"
#include "ops/cuda/stream.h"
#include "ops/cuda/tensors.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Returns true if the kernel can read x in pieces of 16 bytes and the codewords with the same alignment.
bool in_pieces(const void* x, const Shape& shape, int64_t element_bytes, const void* codewords) {
  const int64_t piece = 16 / element_bytes;
  return reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(codewords) % 16 == 0 &&
         shape.stride == 1 && shape.d % piece == 0 && shape.inner_stride % piece == 0 &&
         shape.outer_stride % piece == 0;
}

template <class T, class Codeword, class Parts>
void launch_gather(const T* x, const Shape& shape, Gather<T, Codeword> wanted, const Parts& parts,
                   cudaStream_t stream) {
  const auto launch = [&](auto kernel, int piece) {
    const int64_t blocks =
        divide_rows(wanted, shape, piece, kGatherBlocks * current_device().multiprocessors);
    wanted.error.parts = parts(blocks);
    const int64_t bytes = wanted.in_counters ? sizeof(int) * shape.codebooks * shape.k : 0;
    kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(x, shape, wanted);
    check_launch("vq_forward");
  };
  if constexpr (sizeof(T) < sizeof(double) && sizeof(Codeword) < sizeof(double)) {
    if (in_pieces(x, shape, sizeof(T), wanted.codewords))
      return launch(gather<T, Codeword, kPieceOf<T>>, kPieceOf<T>);
  }
  launch(gather<T, Codeword, 1>, 1);
}

struct VqResults {
  Tensor quantized, indices, counts, largest, sums;
};

// Searches and quantizes. The error goes to `total`. With scales, the rows of each codeword are summed.
VqResults run(const char* op, const Tensor& x, const Tensor& codebook, const std::optional<Tensor>& scales,
              const std::string& metric, bool exact, const SearchSizes& sizes, const Total& total) {
  const int64_t counted = sizes.codebooks * sizes.k, with_sums = scales ? counted : 0;
  constexpr int64_t longest = INT32_MAX / kWarp;  // a tile has kWarp rows
  STD_TORCH_CHECK(counted <= INT32_MAX && sizes.d <= longest, op, ": codebook must have at most ", INT32_MAX,
                  " codewords of at most ", longest, " elements, got ", counted, " of ", sizes.d);
  const cudaStream_t stream = current_stream(x);
  const bool wide = codebook.scalar_type() == ScalarType::Double;
  const Tensor codewords =
      torch::stable::contiguous(torch::stable::to(codebook, wide ? ScalarType::Double : ScalarType::Float));
  VqResults made{torch::stable::new_empty(x, x.sizes()), Tensor(),
                 torch::stable::new_empty(x, {counted}, ScalarType::Long),
                 torch::stable::new_empty(x, {with_sums}, ScalarType::Long),
                 torch::stable::new_empty(x, {with_sums, sizes.d}, ScalarType::Long)};
  const auto numbers = [](Tensor& tensor) { return static_cast<long long*>(tensor.mutable_data_ptr()); };
  const Spans cleared{{numbers(made.counts), numbers(made.largest), numbers(made.sums),
                       reinterpret_cast<long long*>(total.sum), total.adders},
                      {counted, with_sums, with_sums * sizes.d, 1, 1}};
  Quantized wanted{nullptr, nullptr, numbers(made.counts), total};
  if (!scales && !wide && reinterpret_cast<uintptr_t>(codewords.const_data_ptr()) % 16 == 0)
    wanted.target = made.quantized.mutable_data_ptr(),
    wanted.codewords = static_cast<const float*>(codewords.const_data_ptr());
  const auto [indices, all] = assign(op, x, codebook, metric, exact, cleared, wanted);
  made.indices = indices;
  Tensor rows = x, parts;
  const Shape shape = shape_of(rows, sizes);
  if (all || shape.outputs == 0) return made;

  const auto room = [&](int64_t blocks) {
    parts = torch::stable::new_empty(x, {blocks}, ScalarType::Double);
    return static_cast<double*>(parts.mutable_data_ptr());
  };
  const auto launch = [&](auto type, auto code) {
    using T = decltype(type);
    using Codeword = decltype(code);
    const T* data = static_cast<const T*>(rows.const_data_ptr());
    const Codeword* codebook_data = static_cast<const Codeword*>(codewords.const_data_ptr());
    const int64_t* chosen = static_cast<const int64_t*>(made.indices.const_data_ptr());
    T* target = static_cast<T*>(made.quantized.mutable_data_ptr());
    if (!scales) {
      return launch_gather(
          data, shape,
          Gather<T, Codeword>{codebook_data, chosen, target, numbers(made.counts), total, 0, 0, false}, room,
          stream);
    }
    RowSums<T, Codeword> sums{};
    sums.indices = chosen, sums.counts = numbers(made.counts), sums.sums = numbers(made.sums),
    sums.largest = numbers(made.largest);
    sums.scales = static_cast<const double*>(scales->const_data_ptr());
    sums.codewords = codebook_data, sums.quantized = target, sums.error = total;
    launch_row_sums<true>(op, data, shape, sums, room, stream);
  };
  with_type(rows.scalar_type(), [&](auto type) { wide ? launch(type, double{}) : launch(type, float{}); });
  return made;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> vq_forward(const Tensor& x, const Tensor& codebook,
                                                                      std::optional<Tensor> scales,
                                                                      std::string metric, bool exact) {
  const SearchSizes sizes = check_search("vq_forward", x, codebook, metric);
  STD_TORCH_CHECK(
      !scales || (scales->is_cuda() && scales->get_device_index() == x.get_device_index() &&
                  scales->scalar_type() == ScalarType::Double &&
                  scales->numel() == sizes.codebooks * sizes.k && scales->is_contiguous()),
      "vq_forward: scales must be float64, contiguous, one for each codeword, on the device of x");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor error = torch::stable::new_empty(x, {}, ScalarType::Double),
         done = torch::stable::new_empty(x, {1}, ScalarType::Long);
  const Total total{static_cast<double*>(error.mutable_data_ptr()), nullptr, 1, nullptr,
                    static_cast<long long*>(done.mutable_data_ptr())};
  const VqResults made = run("vq_forward", x, codebook, scales, metric, exact, sizes, total);
  return {made.quantized, made.indices, error, made.counts, made.largest, made.sums};
}

// Runs vq without sums. `rotation` is for the backward pass only.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> vq(const Tensor& x, const Tensor& codebook,
                                                      std::string metric, bool exact, bool /*with_sums*/,
                                                      double codebook_weight, double commitment_weight,
                                                      bool /*rotation*/) {
  const SearchSizes sizes = check_search("vq", x, codebook, metric);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const std::vector<int64_t> one;
  const bool empty = x.numel() == 0, wide = x.scalar_type() == ScalarType::Double;
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  Tensor loss = empty ? torch::stable::new_zeros(x, one, type) : torch::stable::new_empty(x, one, type);
  Tensor state =
      torch::stable::new_empty(x, {2}, ScalarType::Long);  // the error, and the counter of its parts
  auto* first = static_cast<long long*>(state.mutable_data_ptr());
  void* target = loss.mutable_data_ptr();
  const double elements = empty ? 1 : static_cast<double>(x.numel());
  const Total total{wide ? static_cast<double*>(target) : reinterpret_cast<double*>(first),
                    wide ? nullptr : static_cast<float*>(target),
                    (codebook_weight + commitment_weight) / elements, nullptr, first + 1};
  const VqResults made = run("vq", x, codebook, {}, metric, exact, sizes, total);
  const auto shape = codebook.sizes();
  return {made.quantized, made.indices, loss,
          torch::stable::reshape(made.counts, shape.slice(0, shape.size() - 1)),
          torch::stable::new_empty(x, {0}, ScalarType::Double)};
}

// Runs vq. Python composes vq with sums, because torch converts the sums from integers there.
void vq_or_sums(StableIValue* stack, uint64_t arguments, uint64_t results) {
  constexpr int kWithSums = 4;
  torch::stable::detail::to<bool>(stack[kWithSums]) ? call_portable<"vq">(stack)
                                                    : TORCH_BOX(&vq)(stack, arguments, results);
}

}  // namespace
}  // namespace uefl::cuda

UEFL_CUDA_OP("vq_forward", TORCH_BOX(&uefl::cuda::vq_forward))
UEFL_CUDA_OP("vq", uefl::cuda::vq_or_sums)
