// vq and vq_forward on CUDA. After the search, one more pass over x quantizes the rows (vq_gather.h, or
// row_sums.h for sums). vq also chooses the units of the sums and converts
// them to float64 (vq_sum_units.h).
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/vq_gather.h"
#include "cuda/vq_sum_units.h"
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

long long* numbers(Tensor& tensor) { return static_cast<long long*>(tensor.mutable_data_ptr()); }

// Chooses the units of the sums of vq before the search.
void launch_expect_units(const Tensor& codewords, int64_t d, const SumUnits& units, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(units.codewords / (kThreads / kWarp) + 1, 4096));
  if (codewords.scalar_type() == ScalarType::Double)
    expect_units<<<blocks, kThreads, 0, stream>>>(static_cast<const double*>(codewords.const_data_ptr()), d,
                                                  units);
  else
    expect_units<<<blocks, kThreads, 0, stream>>>(static_cast<const float*>(codewords.const_data_ptr()), d,
                                                  units);
  check_launch("vq");
}

// Ends the sums of vq.
template <class T>
void launch_finish_sums(const T* x, Shape shape, SumUnits units, cudaStream_t stream) {
  const int64_t work = std::max(shape.outputs, units.codewords * shape.d),
                blocks = std::min((work + kThreads - 1) / kThreads,
                                  kUnitBlocks * current_device().multiprocessors);
  void* arguments[] = {&x, &shape, &units};
  const cudaError_t error =
      cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(finish_sums<T>),
                                  static_cast<unsigned>(blocks), kThreads, arguments, 0, stream);
  STD_TORCH_CHECK(error == cudaSuccess, "vq: the kernel did not launch: ", cudaGetErrorString(error));
}

// The sums of the rows: none, in units from the caller, or in units that are chosen here, as float64.
struct SumsWanted {
  const double* scales = nullptr;
  bool in_float64 = false;

  bool any() const { return scales != nullptr || in_float64; }
};

// Quantizes rows after the search, and sums them if that is wanted. The error goes to `total`.
void quantize(const char* op, Tensor rows, const Shape& shape, const Tensor& codewords,
              const SumsWanted& summed, SumUnits units, const Total& total, VqResults& made,
              cudaStream_t stream) {
  Tensor parts;
  const auto room = [&](int64_t blocks) {
    parts = torch::stable::new_empty(rows, {blocks}, ScalarType::Double);
    return static_cast<double*>(parts.mutable_data_ptr());
  };
  const auto launch = [&](auto type, auto code) {
    using T = decltype(type);
    using Codeword = decltype(code);
    const T* data = static_cast<const T*>(rows.const_data_ptr());
    const Codeword* codebook_data = static_cast<const Codeword*>(codewords.const_data_ptr());
    const int64_t* chosen = static_cast<const int64_t*>(made.indices.const_data_ptr());
    T* target = static_cast<T*>(made.quantized.mutable_data_ptr());
    if (!summed.any()) {
      return launch_gather(
          data, shape,
          Gather<T, Codeword>{codebook_data, chosen, target, numbers(made.counts), total, 0, 0, false}, room,
          stream);
    }
    RowSums<T, Codeword> sums{};
    sums.indices = chosen, sums.counts = numbers(made.counts), sums.sums = numbers(made.sums),
    sums.largest = numbers(made.largest);
    sums.scales = summed.in_float64 ? units.scales : summed.scales;
    sums.codewords = codebook_data, sums.quantized = target, sums.error = total;
    launch_row_sums<true>(op, data, shape, sums, room, stream);
    units.indices = chosen;
    if (summed.in_float64) launch_finish_sums(data, shape, units, stream);
  };
  const bool wide = codewords.scalar_type() == ScalarType::Double;
  with_type(rows.scalar_type(), [&](auto type) { wide ? launch(type, double{}) : launch(type, float{}); });
}

// Searches and quantizes. The error goes to `total`.
VqResults run(const char* op, const Tensor& x, const Tensor& codebook, const SumsWanted& summed,
              const std::string& metric, bool exact, const SearchSizes& sizes, const Total& total) {
  const int64_t counted = sizes.codebooks * sizes.k, with_sums = summed.any() ? counted : 0;
  constexpr int64_t longest = INT32_MAX / kWarp;  // a tile has kWarp rows
  STD_TORCH_CHECK(counted <= INT32_MAX && sizes.d <= longest, op, ": codebook must have at most ", INT32_MAX,
                  " codewords of at most ", longest, " elements, got ", counted, " of ", sizes.d);
  const cudaStream_t stream = current_stream(x);
  const bool wide = codebook.scalar_type() == ScalarType::Double;
  const Tensor codewords =
      torch::stable::contiguous(torch::stable::to(codebook, wide ? ScalarType::Double : ScalarType::Float));
  VqResults made{torch::stable::new_empty(x, x.sizes()), Tensor(),
                 torch::stable::new_empty(x, {counted}, ScalarType::Long),
                 torch::stable::new_empty(x, {with_sums + summed.in_float64}, ScalarType::Long),
                 torch::stable::new_empty(x, {with_sums, sizes.d},
                                          summed.in_float64 ? ScalarType::Double : ScalarType::Long)};
  const Spans cleared{{numbers(made.counts), numbers(made.largest), numbers(made.sums),
                       reinterpret_cast<long long*>(total.sum), total.adders},
                      {counted, made.largest.numel(), with_sums * sizes.d, 1, 1}};
  Tensor scales = torch::stable::new_empty(x, {summed.in_float64 ? counted : 0}, ScalarType::Double);
  SumUnits units{digits_of(x.numel() / sizes.d),
                 counted,
                 static_cast<double*>(scales.mutable_data_ptr()),
                 nullptr,
                 numbers(made.largest),
                 numbers(made.sums),
                 numbers(made.largest) + counted};
  if (summed.in_float64) launch_expect_units(codewords, sizes.d, units, stream);
  made.indices = assign(op, x, codebook, metric, exact, cleared);
  Tensor rows = x;
  const Shape shape = shape_of(rows, sizes);
  if (shape.outputs != 0) quantize(op, rows, shape, codewords, summed, units, total, made, stream);
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
  const SumsWanted summed{scales ? static_cast<const double*>(scales->const_data_ptr()) : nullptr};
  const VqResults made = run("vq_forward", x, codebook, summed, metric, exact, sizes, total);
  return {made.quantized, made.indices, error, made.counts, made.largest, made.sums};
}

// Runs vq. `rotation` is for the backward pass only.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> vq(const Tensor& x, const Tensor& codebook,
                                                      std::string metric, bool exact, bool with_sums,
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
  const VqResults made = run("vq", x, codebook, {nullptr, with_sums}, metric, exact, sizes, total);
  const auto shape = codebook.sizes();
  return {made.quantized, made.indices, loss,
          torch::stable::reshape(made.counts, shape.slice(0, shape.size() - 1)),
          with_sums ? torch::stable::reshape(made.sums, shape)
                    : torch::stable::new_empty(x, {0}, ScalarType::Double)};
}

}  // namespace
}  // namespace uefl::cuda

UEFL_CUDA_OP("vq_forward", TORCH_BOX(&uefl::cuda::vq_forward))
UEFL_CUDA_OP("vq", TORCH_BOX(&uefl::cuda::vq))
