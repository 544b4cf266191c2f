// Registers ema_update on CUDA.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "cuda/ema_update_kernels.h"
#include "ops/check_ema_update.h"
#include "ops/cuda/device.h"
#include "ops/cuda/register.h"
#include "ops/cuda/stream.h"

namespace uefl::cuda {
namespace {

using torch::stable::Tensor;

template <class T>
void launch(const EmaUpdate<T>& run, cudaStream_t stream) {
  const int64_t most = 4 * current_device().multiprocessors;  // thread blocks that run at a time
  const auto blocks = [](int64_t codewords) { return (codewords + kWarps - 1) / kWarps; };
  const int64_t all = std::min(blocks(run.codebooks * run.k), most),
                of_codebook = std::min(blocks(run.k), std::max<int64_t>(1, most / run.codebooks));
  move_averages<<<static_cast<unsigned>(all), kThreads, 0, stream>>>(run);
  set_codewords<<<static_cast<unsigned>(of_codebook * run.codebooks), kThreads, 0, stream>>>(run);
  check_launch("ema_update");
}

EmaUpdateCall::Results ema_update(const Tensor& sizes, const Tensor& averages, const Tensor& codewords,
                                  const Tensor& counts, const Tensor& sums, std::optional<Tensor> weights,
                                  double step, double eps, bool unit) {
  EmaUpdateCall call(sizes, averages, codewords, counts, sums, weights);
  if (counts.numel() == 0) return call.results();
  const torch::stable::accelerator::DeviceGuard guard(averages.get_device_index());
  const cudaStream_t stream = current_stream(averages);
  call.is_double() ? launch(call.of<double>(step, eps, unit), stream)
                   : launch(call.of<float>(step, eps, unit), stream);
  return call.results();
}

}  // namespace
}  // namespace uefl::cuda

UEFL_CUDA_OP("ema_update", TORCH_BOX(&uefl::cuda::ema_update))
