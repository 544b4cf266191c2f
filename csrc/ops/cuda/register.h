// Registers an op on CUDA: in uefl_cuda, and in uefl for the GPUs for which this library has machine code. On
// other GPUs, an op of uefl calls the op of uefl_portable, which Python defines.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace uefl::cuda {
namespace {

__global__ void built() {}

// Returns true if the driver finds code for a GPU. The driver is asked once for each GPU.
inline bool built_for(int32_t index) {
  static const std::vector<bool> found = [] {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    std::vector<bool> devices(static_cast<size_t>(count));
    for (int device = 0; device < count; ++device) {
      const torch::stable::accelerator::DeviceGuard guard(device);
      cudaFuncAttributes attributes;
      devices[static_cast<size_t>(device)] = cudaFuncGetAttributes(&attributes, built) == cudaSuccess;
    }
    (void)cudaGetLastError();  // clears the error of a device without code
    return devices;
  }();
  return static_cast<size_t>(index) < found.size() && found[static_cast<size_t>(index)];
}

template <size_t kSize>
struct OpName {
  char letters[kSize];

  constexpr OpName(const char (&name)[kSize]) { std::copy_n(name, kSize, letters); }
};

// Calls an op by its name, with the arguments and results of the op that calls it.
template <OpName kName>
void call_portable(StableIValue* stack) {
  static const std::string name = std::string("uefl_portable::") + kName.letters;
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name.c_str(), "", stack, TORCH_ABI_VERSION));
}

// Calls it with the arguments of an op, which has no more results than arguments. Returns the results first.
template <OpName kName, class... Arguments>
std::array<StableIValue, sizeof...(Arguments)> run_portable(const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  call_portable<kName>(stack.data());
  return stack;
}

// Runs an op on a GPU with machine code, and the portable op on other GPUs. The first argument of every op is
// a tensor, and its device decides.
template <OpName kName, auto kOp>
void where_built(StableIValue* stack, uint64_t arguments, uint64_t results) {
  int32_t index = 0;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_device_index(torch::stable::detail::to<AtenTensorHandle>(stack[0]), &index));
  built_for(index) ? kOp(stack, arguments, results) : call_portable<kName>(stack);
}

}  // namespace
}  // namespace uefl::cuda

// Registers a boxed function, which is the result of TORCH_BOX for a function.
#define UEFL_CUDA_OP(name, ...)                                                \
  STABLE_TORCH_LIBRARY_IMPL(uefl_cuda, CUDA, m) { m.impl(name, __VA_ARGS__); } \
  STABLE_TORCH_LIBRARY_IMPL(uefl, CUDA, m) { m.impl(name, (&uefl::cuda::where_built<name, __VA_ARGS__>)); }
