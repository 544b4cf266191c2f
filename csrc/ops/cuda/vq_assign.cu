// Chooses the search for a call, launches it, and registers the op with torch.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cuda/vq_assign_mma.h"
#include "cuda/vq_assign_wgmma.h"
#include "ops/cuda/device.h"
#include "ops/cuda/register.h"
#include "ops/cuda/search_launch.h"
#include "ops/cuda/stream.h"
#include "ops/cuda/tensors.h"

namespace uefl::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The kinds of first phase. `streamed` is mma for rows that do not fit into shared memory.
enum class FirstPhase { streamed, mma, wgmma };

// Divides one allocation into the arrays of PackedCodebook, each at a multiple of 16 bytes. `open` is the
// number of rows that the lists of all thread blocks can store.
PackedCodebook carve(const Shape& shape, int64_t open, const Tensor& x, Tensor& workspace) {
  const int64_t codewords = shape.codebooks * shape.padded_k;
  int64_t bytes = 0;
  const auto place = [&](int64_t size) {
    const int64_t at = bytes;
    bytes += (size + 15) / 16 * 16;
    return at;
  };
  const int64_t halves = place(codewords * mma_width(shape.d) * 2);
  const int64_t exact = place(shape.codebooks * shape.k * shape.d * 8),
                bounds = place(4 * shape.codebooks * 8);
  const int64_t center = place(shape.codebooks * shape.d * 4);
  const int64_t longest = place(codewords / kPackCodewords * 8),
                sampled = place(shape.codebooks * kSampledRows * 4);
  const int64_t starts = place(codewords / kBlockCodewords * kStartBytes);
  const int64_t listed = place(open * static_cast<int64_t>(sizeof(Listed)));
  workspace = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  char* first = static_cast<char*>(workspace.mutable_data_ptr());
  PackedCodebook packed{};
  packed.exact = reinterpret_cast<double*>(first + exact),
  packed.bounds = reinterpret_cast<double*>(first + bounds);
  packed.center = reinterpret_cast<float*>(first + center);
  packed.halves = reinterpret_cast<uint16_t*>(first + halves);
  packed.listed = reinterpret_cast<Listed*>(first + listed);
  packed.longest = reinterpret_cast<double*>(first + longest),
  packed.sampled = reinterpret_cast<float*>(first + sampled);
  packed.starts = reinterpret_cast<float*>(first + starts);
  return packed;
}

// The architectures of this build, as CMake writes them. wgmma needs the machine code of sm_90a.
#ifndef UEFL_CUDA_ARCHITECTURES
#define UEFL_CUDA_ARCHITECTURES ""
#endif
constexpr bool kBuiltForSm90a =
    std::string_view(UEFL_CUDA_ARCHITECTURES).find("90a") != std::string_view::npos;

// Returns the fastest allowed first phase. The phases are ordered from the fastest to the slowest, and a
// shape that one phase cannot handle goes to the next one. UEFL_CUDA_SEARCH names the fastest allowed phase,
// to compare phases, or as a workaround if one is wrong on some GPU.
FirstPhase fastest_allowed() {
  const char* value = std::getenv("UEFL_CUDA_SEARCH");
  const std::string choice = value ? value : "";
  const bool has_wgmma = kBuiltForSm90a && current_device().major == 9;
  if (choice.empty() || choice == "auto") return has_wgmma ? FirstPhase::wgmma : FirstPhase::mma;
  if (choice == "streamed") return FirstPhase::streamed;
  if (choice == "mma") return FirstPhase::mma;
  STD_TORCH_CHECK(choice == "wgmma", "UEFL_CUDA_SEARCH=", choice,
                  " is not known; use auto, wgmma, mma or streamed");
  STD_TORCH_CHECK(
      has_wgmma,
      "UEFL_CUDA_SEARCH=wgmma needs a GPU of compute capability 9.0 and kernels built for sm_90a (these: ",
      kBuiltForSm90a ? "built" : "not built", "); use auto, mma or streamed");
  return FirstPhase::wgmma;
}

// Returns the number of thread blocks for this number of tiles: a few for each multiprocessor, which loop
// over the tiles.
unsigned blocks_of_tiles(int64_t tiles, unsigned each) {
  return static_cast<unsigned>(std::min<int64_t>(tiles, each * current_device().multiprocessors));
}

unsigned mma_blocks(const Shape& shape) { return blocks_of_tiles(mma_tiles(shape), 4); }

// Returns true to compare all codewords, and false to compare the least of every four. The second way saves
// comparisons, in proportion to the codewords, and scores four codewords of a row again, in proportion to d.
// The two cost the same for k = 8 d.
bool all_compared(const Shape& shape) { return shape.k <= 512 * (mma_width(shape.d) / kBlockElements); }

template <class T>
void launch_mma(const T* x, const Shape& shape, const PackedCodebook& packed, bool streamed, bool exact,
                int64_t* indices, cudaStream_t stream) {
  const int64_t bytes = mma_bytes(streamed ? kBlockElements : shape.d);
  const auto kernel = streamed              ? search_mma<T, true, true>
                      : all_compared(shape) ? search_mma<T, true, false>
                                            : search_mma<T, false, false>;
  allow_shared("vq_assign", kernel, bytes);
  kernel<<<mma_blocks(shape), kThreads, bytes, stream>>>(x, shape, packed, exact, indices);
}

template <class T>
void launch_wgmma(const T* x, const Shape& shape, const PackedCodebook& packed, const WgmmaPlan& plan,
                  bool exact, int64_t* indices, cudaStream_t stream) {
  const auto kernel = plan.chunks > 1
                          ? (plan.items.groups == 2 ? search_wgmma<T, 2, true> : search_wgmma<T, 3, true>)
                      : plan.items.groups == 2 ? search_wgmma<T, 2, false>
                                               : search_wgmma<T, 3, false>;
  allow_shared("vq_assign", kernel, plan.size);
  kernel<<<plan.items.grid, WgmmaRoles<2, true>::kThreads, static_cast<size_t>(plan.size), stream>>>(
      x, shape, packed, plan, exact, indices);
}

// Returns the plan of wgmma for these rows, with codewords = 0 if wgmma cannot search them.
WgmmaPlan plan_of(const Shape& shape, const Tensor& rows) {
  const auto element_bytes = static_cast<int64_t>(rows.element_size());
  if (rows.scalar_type() == ScalarType::Double ||
      !rows_in_pieces(shape, rows.const_data_ptr(), element_bytes))
    return {};
  return divide(shape, element_bytes, current_device().shared, current_device().multiprocessors);
}

// Launches the kernel that packs the codebook before the search.
template <class Codeword, class Row>
void launch_pack(const char* op, const Codeword* codebook, const Row* rows, Shape shape,
                 PackedCodebook packed, Spans cleared, cudaStream_t stream) {
  const int64_t items = shape.codebooks * (shape.padded_k + kSampledRows) / kPackCodewords;
  void* arguments[] = {&codebook, &rows, &shape, &packed, &cleared};
  const auto kernel = reinterpret_cast<const void*>(pack_codebook<Codeword, Row>);
  const cudaError_t error = cudaLaunchCooperativeKernel(kernel, blocks_of_tiles(items, kPackBlocks), kThreads,
                                                        arguments, 0, stream);
  STD_TORCH_CHECK(error == cudaSuccess, op, ": the kernel did not launch: ", cudaGetErrorString(error));
}

// Zeroes the spans if no search runs, since a search would do it.
void clear(const Spans& spans, cudaStream_t stream) {
  for (int i = 0; i < kSpans; ++i) {
    if (spans.size[i] > 0)
      (void)cudaMemsetAsync(spans.begin[i], 0, static_cast<size_t>(spans.size[i]) * 8, stream);
  }
}

// Returns the search that runs here: wgmma if it has a plan, otherwise mma if a tile fits into shared memory.
FirstPhase search_of(const Shape& shape, const WgmmaPlan& plan) {
  const bool whole = mma_bytes(shape.d) + kMmaStaticBytes <= current_device().shared;
  if (!whole || fastest_allowed() == FirstPhase::streamed) return FirstPhase::streamed;
  return plan.codewords > 0 ? FirstPhase::wgmma : FirstPhase::mma;
}

// Returns the number of rows that the lists of a search must be able to store.
int64_t open_places(const Shape& shape, FirstPhase search, const WgmmaPlan& plan) {
  if (search == FirstPhase::wgmma) return plan.items.grid * kGroupWarps * plan.room;
  return mma_blocks(shape) * kMmaLists * mma_room(shape, mma_blocks(shape));
}

}  // namespace

Tensor assign(const char* op, const Tensor& x, const Tensor& codebook, const std::string& metric, bool exact,
              const Spans& cleared) {
  const SearchSizes given = check_search(op, x, codebook, metric);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);

  Tensor rows = x;
  Shape shape = shape_of(rows, given);
  shape.padded_k = (shape.k + kBlockCodewords - 1) / kBlockCodewords * kBlockCodewords;
  shape.euclidean = metric == "l2";
  STD_TORCH_CHECK(shape.padded_k <= 0x7fffffff, op, ": the codebook has ", shape.k,
                  " codewords, expected fewer than 2^31 - 128");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = shape.segments;
  Tensor indices = torch::stable::new_empty(x, sizes, ScalarType::Long);
  if (shape.outputs == 0) {
    clear(cleared, stream);
    check_launch(op);
    return indices;
  }

  const WgmmaPlan plan = fastest_allowed() == FirstPhase::wgmma ? plan_of(shape, rows) : WgmmaPlan{};
  const FirstPhase search = search_of(shape, plan);
  const Tensor dense = torch::stable::contiguous(codebook);
  Tensor workspace;
  const PackedCodebook packed = carve(shape, open_places(shape, search, plan), x, workspace);
  with_type(dense.scalar_type(), [&](auto codeword) {
    with_type(rows.scalar_type(), [&](auto element) {
      launch_pack(op, static_cast<const decltype(codeword)*>(dense.const_data_ptr()),
                  static_cast<const decltype(element)*>(rows.const_data_ptr()), shape, packed, cleared,
                  stream);
    });
  });

  int64_t* target = static_cast<int64_t*>(indices.mutable_data_ptr());
  with_type(rows.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(rows.const_data_ptr());
    if constexpr (!std::is_same_v<T, double>) {
      if (search == FirstPhase::wgmma) launch_wgmma(data, shape, packed, plan, exact, target, stream);
    }
    if (search != FirstPhase::wgmma)
      launch_mma(data, shape, packed, search == FirstPhase::streamed, exact, target, stream);
  });
  check_launch(op);
  return indices;
}

namespace {

Tensor vq_assign(const Tensor& x, const Tensor& codebook, std::string metric, bool exact) {
  return assign("vq_assign", x, codebook, metric, exact);
}

}  // namespace
}  // namespace uefl::cuda

UEFL_CUDA_OP("vq_assign", TORCH_BOX(&uefl::cuda::vq_assign))
