// The caller's CUDA stream, and launch errors as exceptions.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/tensor.h>

// The symbol is weak, because only libtorch_cuda has it. So the same library loads with libtorch_cuda and
// with a CPU build of torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace uefl::cuda {

inline cudaStream_t current_stream(const torch::stable::Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, what, ": the kernel did not launch: ", cudaGetErrorString(error));
}

}  // namespace uefl::cuda
