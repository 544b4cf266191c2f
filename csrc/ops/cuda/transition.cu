// Launches the kernels of transition_kernels.h, and registers the ops with torch.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "cuda/transition_kernels.h"
#include "ops/check_transition.h"
#include "ops/cuda/register.h"
#include "ops/cuda/stream.h"
#include "ops/cuda/tensors.h"

namespace uefl::cuda {
namespace transition {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

// Returns the number of thread blocks for this number of warps. The kernels loop.
unsigned blocks(int64_t count) {
  constexpr int64_t kToBlock = kThreads / kWarp;
  return static_cast<unsigned>(std::clamp<int64_t>((count + kToBlock - 1) / kToBlock, 1, 1 << 20));
}

ScalarType wide(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor dense(const Tensor& tensor, ScalarType dtype) {
  return torch::stable::contiguous(tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype));
}

// The arguments that the transition ops share. It holds the tensors that the kernels read, and keeps their
// device current.
struct Input {
  Input(const char* op, const Tensor& logits, const Tensor& log_transition, const Tensor& log_marginal,
        const std::optional<Tensor>& groups_given)
      : check(op, logits), logits(logits) {
    check.require(log_transition.dim() == 3 && log_transition.numel() > 0,
                  "log_transition must have shape [G, M, K]");
    check.values("log_transition", log_transition,
                 {log_transition.size(0), log_transition.size(1), logits.size(1)});
    check.values("log_marginal", log_marginal, {log_transition.size(0), logits.size(1)});
    if (groups_given) {
      check.index("groups", *groups_given, logits.size(0));
    } else {
      check.require(log_transition.size(0) == 1, "without groups, log_transition must have shape [1, M, K]");
    }
    guard.emplace(logits.get_device_index());  // after the checks: logits may be on the CPU
    if (groups_given) groups = torch::stable::contiguous(*groups_given);
    matrix = dense(log_transition, wide(logits));
    marginal = dense(log_marginal, wide(logits));
  }

  template <class T>
  TransitionProblem<T> problem() const {
    return {static_cast<const T*>(logits.const_data_ptr()),
            logits.size(0),
            logits.size(1),
            logits.stride(0),
            logits.stride(1),
            static_cast<const Wide<T>*>(matrix.const_data_ptr()),
            static_cast<const Wide<T>*>(marginal.const_data_ptr()),
            groups ? static_cast<const int64_t*>(groups->const_data_ptr()) : nullptr,
            matrix.size(0),
            matrix.size(1)};
  }

  CheckInputs check;
  std::optional<DeviceGuard> guard;
  const Tensor& logits;
  Tensor matrix, marginal;
  std::optional<Tensor> groups;
};

std::tuple<Tensor, Tensor> transition_nll(const Tensor& logits, const Tensor& targets,
                                          const Tensor& log_transition, const Tensor& log_marginal,
                                          std::optional<Tensor> groups, int64_t ignore_index,
                                          bool with_gradient) {
  const Input input("transition_nll", logits, log_transition, log_marginal, groups);
  input.check.index("targets", targets, logits.size(0));
  const Tensor sets = torch::stable::contiguous(targets);
  Tensor loss = torch::stable::new_empty(logits, {logits.size(0)}, wide(logits));
  Tensor gradient = with_gradient ? torch::stable::new_empty(logits, logits.sizes())
                                  : torch::stable::new_empty(logits, {0});
  const cudaStream_t stream = current_stream(logits);
  with_type(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* slope = with_gradient ? static_cast<T*>(gradient.mutable_data_ptr()) : nullptr;
    nll<T><<<blocks(logits.size(0)), kThreads, 0, stream>>>(
        input.problem<T>(), static_cast<const int64_t*>(sets.const_data_ptr()), ignore_index,
        static_cast<Wide<T>*>(loss.mutable_data_ptr()), slope);
  });
  check_launch("transition_nll");
  return {loss, gradient};
}

Tensor probs_of(const Input& input) {
  Tensor log_g = torch::stable::new_empty(input.logits, {input.logits.size(0), input.matrix.size(1)},
                                          wide(input.logits));
  const cudaStream_t stream = current_stream(input.logits);
  with_type(input.logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    probs<T><<<blocks(input.logits.size(0)), kThreads, 0, stream>>>(
        input.problem<T>(), static_cast<Wide<T>*>(log_g.mutable_data_ptr()));
  });
  check_launch("log_transition_probs");
  return log_g;
}

Tensor log_transition_probs(const Tensor& logits, const Tensor& log_transition, const Tensor& log_marginal,
                            std::optional<Tensor> groups) {
  return probs_of(Input("log_transition_probs", logits, log_transition, log_marginal, groups));
}

Tensor log_transition_probs_backward(const Tensor& grad, const Tensor& logits, const Tensor& log_transition,
                                     const Tensor& log_marginal, std::optional<Tensor> groups) {
  const Input input("log_transition_probs_backward", logits, log_transition, log_marginal, groups);
  input.check.values("grad", grad, {logits.size(0), input.matrix.size(1)});
  const Tensor weight = dense(grad, wide(logits)), log_g = probs_of(input);
  Tensor gradient = torch::stable::new_empty(logits, logits.sizes());
  const cudaStream_t stream = current_stream(logits);
  with_type(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    probs_backward<T><<<blocks(logits.size(0)), kThreads, 0, stream>>>(
        input.problem<T>(), static_cast<const Wide<T>*>(weight.const_data_ptr()),
        static_cast<const Wide<T>*>(log_g.const_data_ptr()), static_cast<T*>(gradient.mutable_data_ptr()));
  });
  check_launch("log_transition_probs_backward");
  return gradient;
}

std::tuple<Tensor, Tensor> set_proportion_loss(const Tensor& logits, const Tensor& offsets,
                                               const Tensor& proportions, bool with_gradient) {
  const CheckInputs check("set_proportion_loss", logits);
  check.require(proportions.dim() == 2 && proportions.size(0) > 0, "proportions must have shape [S, K]");
  check.values("proportions", proportions, {proportions.size(0), logits.size(1)});
  check.index("offsets", offsets, proportions.size(0) + 1);
  const DeviceGuard guard(logits.get_device_index());
  const Tensor bounds = torch::stable::contiguous(offsets), shares = dense(proportions, wide(logits));
  const int64_t n = logits.size(0), k = logits.size(1), sets = proportions.size(0);
  Tensor loss = torch::stable::new_empty(logits, {sets}, wide(logits));
  Tensor gradient = with_gradient ? torch::stable::new_zeros(logits, logits.sizes())
                                  : torch::stable::new_empty(logits, {0});
  Tensor workspace = torch::stable::new_empty(logits, {n + sets * k}, wide(logits));
  const cudaStream_t stream = current_stream(logits);
  with_type(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    Wide<T>* totals = static_cast<Wide<T>*>(workspace.mutable_data_ptr());
    const SetProblem<T> problem{static_cast<const T*>(logits.const_data_ptr()),
                                n,
                                k,
                                logits.stride(0),
                                logits.stride(1),
                                static_cast<const int64_t*>(bounds.const_data_ptr()),
                                static_cast<const Wide<T>*>(shares.const_data_ptr()),
                                sets,
                                totals,
                                totals + n};
    row_totals<T><<<blocks(n), kThreads, 0, stream>>>(problem);
    class_totals<T><<<blocks(sets * k), kThreads, 0, stream>>>(problem);
    T* slope = with_gradient ? static_cast<T*>(gradient.mutable_data_ptr()) : nullptr;
    proportion<T><<<static_cast<unsigned>(std::min<int64_t>(sets, 1 << 20)), kThreads, 0, stream>>>(
        problem, static_cast<Wide<T>*>(loss.mutable_data_ptr()), slope);
  });
  check_launch("set_proportion_loss");
  return {loss, gradient};
}

}  // namespace
}  // namespace transition
}  // namespace uefl::cuda

UEFL_CUDA_OP("transition_nll", TORCH_BOX(&uefl::cuda::transition::transition_nll))
UEFL_CUDA_OP("log_transition_probs", TORCH_BOX(&uefl::cuda::transition::log_transition_probs))
UEFL_CUDA_OP("log_transition_probs_backward",
             TORCH_BOX(&uefl::cuda::transition::log_transition_probs_backward))
UEFL_CUDA_OP("set_proportion_loss", TORCH_BOX(&uefl::cuda::transition::set_proportion_loss))
