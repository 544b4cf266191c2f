// Registers the transition ops and set_proportion_loss for the CPU, with checks of shapes.
#include "cpu/transition.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "cpu/set_proportion_loss.h"
#include "ops/check_transition.h"
#include "ops/dtype.h"

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Returns the dtype of losses and constants: float64 for float64 logits, otherwise float32.
ScalarType wide(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor dense(const Tensor& tensor, ScalarType dtype) {
  return torch::stable::contiguous(tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype));
}

cpu::StridedRows rows_of(const Tensor& logits) {
  cpu::StridedRows rows;
  cpu::view_rows(logits.const_data_ptr(), dtype_of(logits), logits.sizes().data(), logits.strides().data(), 2,
                 rows);  // two dimensions always fit
  return rows;
}

const int64_t* indices(const Tensor& tensor) { return static_cast<const int64_t*>(tensor.const_data_ptr()); }

// The arguments that the transition ops share, with the tensors that the kernels read.
struct TransitionInput {
  TransitionInput(const char* op, const Tensor& logits_given, const Tensor& log_transition,
                  const Tensor& log_marginal, const std::optional<Tensor>& groups_given)
      : check(op, logits_given), logits(logits_given) {
    check.require(log_transition.dim() == 3 && log_transition.numel() > 0,
                  "log_transition must have shape [G, M, K]");
    log.g = log_transition.size(0), log.m = log_transition.size(1), log.k = logits.size(1);
    check.values("log_transition", log_transition, {log.g, log.m, log.k});
    check.values("log_marginal", log_marginal, {log.g, log.k});
    matrix = dense(log_transition, wide(logits));
    marginal = dense(log_marginal, wide(logits));
    log.matrix = matrix.const_data_ptr(), log.marginal = marginal.const_data_ptr();
    if (groups_given) {
      check.index("groups", *groups_given, logits.size(0));
      groups = torch::stable::contiguous(*groups_given);
    } else {
      check.require(log.g == 1, "without groups, log_transition must have shape [1, M, K]");
    }
  }

  const int64_t* group_indices() const { return groups ? indices(*groups) : nullptr; }

  CheckInputs check;
  Tensor logits, matrix, marginal;
  std::optional<Tensor> groups;
  cpu::LogTransition log;
};

std::tuple<Tensor, Tensor> transition_nll(const Tensor& logits, const Tensor& targets,
                                          const Tensor& log_transition, const Tensor& log_marginal,
                                          std::optional<Tensor> groups, int64_t ignore_index,
                                          bool with_gradient) {
  const TransitionInput input("transition_nll", logits, log_transition, log_marginal, groups);
  input.check.index("targets", targets, logits.size(0));
  const Tensor sets = torch::stable::contiguous(targets);
  Tensor loss = torch::stable::new_empty(logits, {logits.size(0)}, wide(logits));
  Tensor gradient = with_gradient ? torch::stable::new_empty(logits, logits.sizes())
                                  : torch::stable::new_empty(logits, {0});
  const cpu::Transition run("transition_nll", rows_of(logits), indices(sets), input.group_indices(),
                            input.log, ignore_index);
  void *to = loss.mutable_data_ptr(), *slope = with_gradient ? gradient.mutable_data_ptr() : nullptr;
  torch::stable::parallel_for(0, run.blocks(), 1,
                              [&](int64_t lo, int64_t hi) { run.nll(lo, hi, to, slope); });
  return {loss, gradient};
}

Tensor log_transition_probs(const Tensor& logits, const Tensor& log_transition, const Tensor& log_marginal,
                            std::optional<Tensor> groups) {
  const TransitionInput input("log_transition_probs", logits, log_transition, log_marginal, groups);
  Tensor log_g = torch::stable::new_empty(logits, {logits.size(0), input.log.m}, wide(logits));
  const cpu::Transition run("log_transition_probs", rows_of(logits), nullptr, input.group_indices(),
                            input.log);
  void* to = log_g.mutable_data_ptr();
  torch::stable::parallel_for(0, run.blocks(), 1, [&](int64_t lo, int64_t hi) { run.probs(lo, hi, to); });
  return log_g;
}

Tensor log_transition_probs_backward(const Tensor& grad, const Tensor& logits, const Tensor& log_transition,
                                     const Tensor& log_marginal, std::optional<Tensor> groups) {
  const TransitionInput input("log_transition_probs_backward", logits, log_transition, log_marginal, groups);
  input.check.values("grad", grad, {logits.size(0), input.log.m});
  const Tensor weight = dense(grad, wide(logits));
  Tensor gradient = torch::stable::new_empty(logits, logits.sizes());
  const cpu::Transition run("log_transition_probs_backward", rows_of(logits), nullptr, input.group_indices(),
                            input.log);
  void* to = gradient.mutable_data_ptr();
  const void* from = weight.const_data_ptr();
  torch::stable::parallel_for(0, run.blocks(), 1,
                              [&](int64_t lo, int64_t hi) { run.probs_backward(lo, hi, from, to); });
  return gradient;
}

std::tuple<Tensor, Tensor> set_proportion_loss(const Tensor& logits, const Tensor& offsets,
                                               const Tensor& proportions, bool with_gradient) {
  const CheckInputs check("set_proportion_loss", logits);
  check.require(proportions.dim() == 2 && proportions.size(0) > 0, "proportions must have shape [S, K]");
  check.values("proportions", proportions, {proportions.size(0), logits.size(1)});
  check.index("offsets", offsets, proportions.size(0) + 1);
  const Tensor bounds = torch::stable::contiguous(offsets), shares = dense(proportions, wide(logits));
  const cpu::Sets sets{indices(bounds), shares.const_data_ptr(), shares.size(0), shares.size(1)};
  const cpu::StridedRows rows = rows_of(logits);
  cpu::check(sets, rows);
  Tensor loss = torch::stable::new_empty(logits, {sets.sets}, wide(logits));
  Tensor gradient = with_gradient ? torch::stable::new_empty(logits, logits.sizes())
                                  : torch::stable::new_empty(logits, {0});
  void *to = loss.mutable_data_ptr(), *slope = with_gradient ? gradient.mutable_data_ptr() : nullptr;
  torch::stable::parallel_for(0, sets.sets, 1, [&](int64_t lo, int64_t hi) {
    cpu::set_proportion_loss(sets, rows, lo, hi, to, slope);
  });
  return {loss, gradient};
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) {
  m.impl("transition_nll", TORCH_BOX(&uefl::transition_nll));
  m.impl("log_transition_probs", TORCH_BOX(&uefl::log_transition_probs));
  m.impl("log_transition_probs_backward", TORCH_BOX(&uefl::log_transition_probs_backward));
  m.impl("set_proportion_loss", TORCH_BOX(&uefl::set_proportion_loss));
}
