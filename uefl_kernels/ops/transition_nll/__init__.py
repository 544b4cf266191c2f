"""``transition_nll``: the loss of learning classes from sets with known class priors.

It works in log space, with its gradient in one pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._checks import check_targets, check_transition, needs_gradient_without_vmap
from ..._dtypes import result_dtype
from ..._library import define, define_triton, once_differentiable, resolve


class Arguments(NamedTuple):
    """Arguments of the op."""

    logits: torch.Tensor
    """``[B, K]``"""
    targets: torch.Tensor
    """``[B]`` int64"""
    log_transition: torch.Tensor
    """``[G, M, K]``"""
    log_marginal: torch.Tensor
    """``[G, K]``"""
    groups: torch.Tensor | None
    """``[B]`` int64"""
    ignore_index: int
    with_gradient: bool


def _fake(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    logits = given.logits
    loss = logits.new_empty(logits.shape[0], dtype=result_dtype(logits))
    return loss, logits.new_empty(logits.shape if given.with_gradient else (0,))


class _TransitionNLL(torch.autograd.Function):
    """The op with its gradient.

    A gradient registered with the op would cost 35 us more a step, most of the time of a small batch.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        logits: torch.Tensor = given[0]
        loss: torch.Tensor
        loss, gradient = resolve("transition_nll", logits)(*given)
        ctx.save_for_backward(logits, gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, gradient = ctx.saved_tensors
        grad_logits = (gradient * grad_loss[:, None]).to(gradient.dtype)
        gradient = once_differentiable("transition_nll", grad_logits, logits, grad_loss)
        return gradient, *[None] * (len(Arguments._fields) - 1)


define(__name__, "transition_nll", Arguments, ["loss", "gradient"], fake=_fake)
define_triton("transition_nll")


def transition_nll(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_transition: torch.Tensor,
    *,
    groups: torch.Tensor | None = None,
    log_marginal: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Compute the negative log-likelihood of the set that a sample came from, given logits of its class.

    With A = exp(log_transition), p = softmax(logits) and g = A p / sum(A p), the loss is -log g[target]. It
    is computed as the difference of two log-sum-exps over the classes, without p, g or a division; A needs no
    normalization.

    Args:
        logits: ``[B, K]``, float32, bfloat16, float16 or float64; any strides.
        targets: ``[B]`` int64, the set of each sample, 0 to M - 1.
        log_transition: ``[M, K]``, float32 or float64: see :func:`log_transition_matrix`. Or ``[G, M, K]``,
            one matrix for each group (client) of a mixed batch, those with fewer sets filled up with rows of
            -inf (``torch.nn.utils.rnn.pad_sequence(matrices, batch_first=True, padding_value=-torch.inf)``).
            The matrix is a constant: it gets no gradient, and a matrix that requires a gradient is refused.
        groups: ``[B]`` int64, the group of each sample; for ``[G, M, K]`` only.
        log_marginal: ``log_transition.logsumexp(-2)``. Pass it when a matrix serves for more than one step.
        ignore_index: samples with this target have loss 0 and gradient 0.

    Returns:
        loss ``[B]``, float32 (float64 for float64 logits), differentiable with respect to logits (a second
        derivative and forward mode raise RuntimeError): softmax(logits + log_marginal) - softmax(logits +
        log_transition[target]), every entry in [-1, 1]. An entry of -inf is a prior of zero, which is valid.
        A class that no set of the group has gets gradient zero. If a logit is NaN or +inf, or if all logits
        are -inf, the loss and the gradient of the sample are NaN. A logit of -inf excludes its class. If no
        class with a positive prior in the target's set is left, the loss is +inf (NaN if no set has such a
        class) and the gradient NaN.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices that do not fit.
        RuntimeError: on the CPU: a target or group out of range, a target with a row of -inf in
            log_transition, NaN or +inf in log_transition, or a target's row (of more than one class) in [0,
            1] with a sum of 1 within 0.01: shares instead of logarithms. Logarithms of weights such as 1 and
            e can look like this, too: a constant added to the whole matrix lets them pass and changes no
            result. A check would stall a GPU. So on a GPU a target out of range or a matrix with NaN
            gives NaN, and a row of -inf gives a loss of +inf.

    Source: Lu et al. 2022, "Federated Learning from Only Unlabeled Data with Class-Conditional-Sharing
        Clients" (FedUL), Theorem 1.

    Equivalent to (``[M, K]``)::

        sets = (logits[:, None, :] + log_transition).logsumexp(2)
        log_g = sets - (logits + log_transition.logsumexp(0)).logsumexp(1, keepdim=True)
        F.nll_loss(log_g, targets, reduction="none", ignore_index=ignore_index)
    """
    matrix, marginal = check_transition("transition_nll", logits, log_transition, groups, log_marginal)
    ignore_index = check_targets("transition_nll", targets, ignore_index, logits)
    with_gradient = needs_gradient_without_vmap("transition_nll", logits)
    given = Arguments(logits, targets, matrix, marginal, groups, ignore_index, with_gradient)
    if not with_gradient:
        return resolve("transition_nll", logits)(*given)[0]  # type: ignore[no-any-return]
    return _TransitionNLL.apply(*given)  # type: ignore[no-any-return]
