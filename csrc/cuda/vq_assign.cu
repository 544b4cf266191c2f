// Which search takes a call, the launches, and what torch sees of them.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "common/check_search.h"
#include "cuda/stream.h"
#include "cuda/vq_assign.h"
#include "cuda/vq_assign_deep.h"
#include "cuda/vq_assign_kernels.h"
#include "cuda/vq_assign_tensor.h"
#include "cuda/vq_assign_wgmma.h"

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

// The architectures that this was compiled for, as CMake has them; wgmma runs on what sm_90a was compiled to and on nothing else.
#ifndef UEFL_CUDA_ARCHITECTURES
#define UEFL_CUDA_ARCHITECTURES ""
#endif
constexpr bool kBuiltForSm90a = std::string_view(UEFL_CUDA_ARCHITECTURES).find("90a") != std::string_view::npos;

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) return 0;
  return value;
}

// The fastest first pass that may be taken, from the slowest to the fastest; each leaves what it cannot do to the one before.
enum class Search { float32, mma, wgmma };

// UEFL_CUDA_SEARCH names the fastest allowed: to compare them, and a way out should one prove wrong on some GPU.
Search fastest_allowed() {
  const char* value = std::getenv("UEFL_CUDA_SEARCH");
  const std::string choice = value ? value : "";
  const bool has_wgmma = kBuiltForSm90a && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
  if (choice.empty() || choice == "auto") return has_wgmma ? Search::wgmma : Search::mma;
  if (choice == "float32") return Search::float32;
  if (choice == "mma") return Search::mma;
  STD_TORCH_CHECK(choice == "wgmma", "UEFL_CUDA_SEARCH=", choice, " is not known; use auto, wgmma, mma or float32");
  STD_TORCH_CHECK(has_wgmma, "UEFL_CUDA_SEARCH=wgmma needs a GPU of compute capability 9.0 and kernels built for sm_90a (these: ",
                  kBuiltForSm90a ? "built" : "not built", "); use auto, mma or float32");
  return Search::wgmma;
}

constexpr unsigned kListBlocks = 1024;

// The longest codeword that fits the registers of a row's fragments.
constexpr int64_t kLongestTensor = 128;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Elements of a codeword for mma.sync: 16 times a power of two.
int width_of(int64_t d) {
  int width = 16;
  while (width < d) width *= 2;
  return width;
}

PackedHalves carve_halves(const Shape& shape, int64_t padded_k, int width, bool blocks, const Tensor& x, Tensor& workspace) {
  const int64_t codes = shape.books * padded_k;
  const int64_t bytes = 16 * shape.books + 8 * shape.outputs + codes * (4 + 2 * width);
  workspace = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  PackedHalves halves{};
  halves.codes = static_cast<uint16_t*>(workspace.mutable_data_ptr());  // first, and a multiple of 32 bytes: copied 16 at a time
  halves.rest = reinterpret_cast<double*>(halves.codes + codes * width);
  halves.counts = reinterpret_cast<long long*>(halves.rest + shape.books);
  halves.listed = reinterpret_cast<int64_t*>(halves.counts + shape.books);
  halves.half_norms = reinterpret_cast<float*>(halves.listed + shape.outputs);
  halves.padded_k = padded_k;
  halves.width = width;
  halves.blocks = blocks;
  return halves;
}

template <class T>
void launch_tensor(const T* x, const Shape& shape, const Packed& packed, const PackedHalves& halves, bool exact, int64_t* indices,
                   const Tail& tail, cudaStream_t stream) {
  const auto launch = [&](auto kernel, int64_t rows) {
    const int64_t tiles = (shape.outputs / shape.books + rows - 1) / rows * shape.books;
    kernel<<<blocks(tiles * kThreads), kThreads, 0, stream>>>(x, shape, packed, halves, exact, indices, tail);
  };
  switch (halves.width) {
    case 16:
      return launch(search_tensor<T, 1>, Tiling<1>::kBlockRows);
    case 32:
      return launch(search_tensor<T, 2>, Tiling<2>::kBlockRows);
    case 64:
      return launch(search_tensor<T, 4>, Tiling<4>::kBlockRows);
    default:
      return launch(search_tensor<T, 8>, Tiling<8>::kBlockRows);
  }
}

// Shared memory beyond what every kernel may have.
template <class Kernel>
void allow_shared(Kernel kernel, int64_t bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  STD_TORCH_CHECK(error == cudaSuccess, "vq_assign: ", cudaGetErrorString(error));
}

template <class T>
void launch_deep(const T* x, const Shape& shape, const Packed& packed, const PackedHalves& halves, bool exact, int64_t* indices,
                 const Tail& tail, cudaStream_t stream) {
  const int64_t tiles = (shape.outputs / shape.books + kDeepRows - 1) / kDeepRows * shape.books, bytes = deep_bytes(halves.width);
  allow_shared(search_deep<T>, bytes);
  search_deep<<<blocks(tiles * kThreads), kThreads, bytes, stream>>>(x, shape, packed, halves, exact, indices, tail);
}

template <class T>
void launch_wgmma(const T* x, const Shape& shape, const Packed& packed, const PackedHalves& halves, const Stages& stages, bool exact,
                  int64_t* indices, const Tail& tail, cudaStream_t stream) {
  allow_shared(search_wgmma<T>, stages.size);
  const int64_t processors = std::max(1, device_attribute(cudaDevAttrMultiProcessorCount));
  const auto grid = static_cast<unsigned>(std::min(Tiles(shape).number, processors));
  search_wgmma<<<grid, kWgmmaThreads, stages.size, stream>>>(x, shape, packed, halves, stages, exact, indices, tail);
}

}  // namespace

Tensor assign(const char* op, const Tensor& x, const Tensor& codebook, const std::string& metric, bool exact, const Follow& follow) {
  const SearchSizes given = check_search(op, x, codebook, metric);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);

  Shape shape{};
  shape.books = given.books;
  shape.k = given.k;
  shape.d = given.d;
  shape.padded_k = (shape.k + kCodes - 1) / kCodes * kCodes;
  shape.segments = given.segments;
  shape.euclidean = metric == "l2";
  STD_TORCH_CHECK(shape.padded_k <= 0x7fffffff, op, ": the codebook has ", shape.k, " codewords, expected fewer than 2^31 - 64");

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
  check_launch(op);

  int64_t* target = static_cast<int64_t*>(indices.mutable_data_ptr());
  const Search fastest = fastest_allowed();
  const int64_t element_bytes = static_cast<int64_t>(rows.element_size()), blocks_of_codes = round_up(shape.k, kBlockCodes);
  const int64_t shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  Stages stages;  // none: not for wgmma
  if (fastest == Search::wgmma && rows.scalar_type() != ScalarType::Double && rows_in_bulk(shape, rows.const_data_ptr(), element_bytes)) {
    stages = divide(shape, blocks_of_codes, element_bytes, shared);
  }
  const int64_t block_width = round_up(shape.d, kBlockElements);
  const bool wgmma = stages.rows > 0, mma = !wgmma && fastest != Search::float32 && shape.d <= kLongestTensor;
  const bool deep =
      !wgmma && fastest != Search::float32 && shape.d > kLongestTensor && deep_bytes(block_width) + kDeepStaticBytes <= shared;
  const bool tensor = wgmma || mma || deep;
  Tail tail = follow ? follow(shape) : Tail{};
  Tensor open;
  if (follow) {
    open = torch::stable::new_empty(x, {shape.outputs}, ScalarType::Byte);
    tail.open = static_cast<unsigned char*>(open.mutable_data_ptr());
    // The float32 search, whose registers are all in use, leaves every row open: to read x once more is little beside its products.
    if (!tensor) STD_TORCH_CHECK(cudaMemsetAsync(tail.open, 1, shape.outputs, stream) == cudaSuccess, op, ": cudaMemsetAsync failed");
  }
  Tensor tensor_workspace;
  PackedHalves halves{};
  if (tensor) {
    halves = mma ? carve_halves(shape, shape.padded_k, width_of(shape.d), false, x, tensor_workspace)
                 : carve_halves(shape, blocks_of_codes, static_cast<int>(block_width), true, x, tensor_workspace);
    const cudaError_t error = cudaMemsetAsync(halves.rest, 0, 16 * shape.books, stream);  // and the counts
    STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
    pack_halves<<<blocks(shape.books * halves.padded_k * kWarp), kThreads, 0, stream>>>(shape, packed, halves);
    check_launch(op);
  }
  const int64_t tiles = (shape.outputs / shape.books + kRows - 1) / kRows * shape.books;
  with_type(rows.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(rows.const_data_ptr());
    if constexpr (!std::is_same_v<T, double>) {
      if (wgmma) launch_wgmma(data, shape, packed, halves, stages, exact, target, tail, stream);
    }
    if (deep) launch_deep(data, shape, packed, halves, exact, target, tail, stream);
    if (mma) launch_tensor(data, shape, packed, halves, exact, target, tail, stream);
    const Selection selection = tensor ? Selection{halves.listed, halves.counts} : Selection{};
    // The list is short as a rule: few blocks, which walk it.
    const unsigned grid = tensor ? std::min(blocks(tiles * kThreads), kListBlocks) : blocks(tiles * kThreads);
    if (exact || !tensor) search<<<grid, kThreads, 0, stream>>>(data, shape, packed, exact, target, selection);
    rescore<<<blocks(shape.outputs), kThreads, 0, stream>>>(data, shape, packed, target);
    if (tail.open) finish_open<<<blocks(shape.outputs), kThreads, 0, stream>>>(data, shape, tail, target);
  });
  check_launch(op);
  return indices;
}

namespace {

Tensor vq_assign(const Tensor& x, const Tensor& codebook, std::string metric, bool exact) {
  return assign("vq_assign", x, codebook, metric, exact, {});
}

}  // namespace
}  // namespace uefl::cuda

STABLE_TORCH_LIBRARY_IMPL(uefl_cuda, CUDA, m) { m.impl("vq_assign", TORCH_BOX(&uefl::cuda::vq_assign)); }
