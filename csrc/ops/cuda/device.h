// Properties of devices and kernels, which are read from the driver once in a process.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace uefl::cuda {

struct Device {
  int64_t multiprocessors = 1,
          shared = 0;  // shared: most bytes of a thread block, static and dynamic together
  int major = 0;       // major number of the compute capability
};

inline std::vector<Device> ask_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return {};
  std::vector<Device> found(static_cast<size_t>(count));
  for (int index = 0; index < count; ++index) {
    const auto ask = [&](cudaDeviceAttr attribute, int otherwise) {
      int value = 0;
      return cudaDeviceGetAttribute(&value, attribute, index) == cudaSuccess ? value : otherwise;
    };
    found[index] = {std::max(1, ask(cudaDevAttrMultiProcessorCount, 1)),
                    ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
                    ask(cudaDevAttrComputeCapabilityMajor, 0)};
  }
  return found;
}

// Returns the current device, which a guard has set to the device of the tensors.
inline const Device& current_device() {
  static const std::vector<Device> devices = ask_devices();
  static const Device none;
  int index = 0;
  const bool known = cudaGetDevice(&index) == cudaSuccess && static_cast<size_t>(index) < devices.size();
  return known ? devices[static_cast<size_t>(index)] : none;
}

// Allows a kernel this number of bytes of dynamic shared memory on the current device. It calls the driver
// only if the number grows.
template <class Kernel>
void allow_shared(const char* op, Kernel kernel, int64_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int64_t> allowed;
  int index = 0;
  (void)cudaGetDevice(&index);
  const std::lock_guard lock(mutex);
  int64_t& most = allowed[{reinterpret_cast<const void*>(kernel), index}];
  if (bytes <= most) return;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  STD_TORCH_CHECK(error == cudaSuccess, op, ": CUDA failed: ", cudaGetErrorString(error));
  most = bytes;
}

}  // namespace uefl::cuda
