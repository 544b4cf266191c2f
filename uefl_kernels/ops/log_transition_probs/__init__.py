"""``log_transition_probs``: log-probabilities of the sets from logits of the classes.

The published loss is computed from these probabilities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._checks import check_targets, check_transition, needs_gradient_without_vmap
from ..._dtypes import result_dtype
from ..._library import define, define_triton, once_differentiable, resolve
from ..transition_nll.value_checks import require_groups, require_matrix, require_rows


class Arguments(NamedTuple):
    """Arguments of the op."""

    logits: torch.Tensor
    """``[B, K]``"""
    log_transition: torch.Tensor
    """``[G, M, K]``"""
    log_marginal: torch.Tensor
    """``[G, K]``"""
    groups: torch.Tensor | None
    """``[B]`` int64"""


class Gradient(NamedTuple):
    """The first argument of the backward op."""

    grad: torch.Tensor
    """``[B, M]``"""


def _fake(given: Arguments) -> torch.Tensor:
    logits = given.logits
    return logits.new_empty(len(logits), given.log_transition.shape[1], dtype=result_dtype(logits))


def _fake_backward(_: Gradient, given: Arguments) -> torch.Tensor:
    return given.logits.new_empty(given.logits.shape)


class _LogTransitionProbs(torch.autograd.Function):
    """The op with its gradient.

    See ``transition_nll``.
    """

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(*given)
        logits: Any = given[0]
        log_g: torch.Tensor = resolve("log_transition_probs", logits)(*given)
        return log_g

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # read once: non-reentrant checkpointing unpacks saved tensors a single time
        given = Arguments(*ctx.saved_tensors)
        with torch.no_grad():
            grad_logits = resolve("log_transition_probs_backward", given.logits)(grad, *given)
        return once_differentiable("log_transition_probs", grad_logits, given.logits, grad), None, None, None


define(__name__, "log_transition_probs", Arguments, ["log_g"], fake=_fake)
define(__name__, "log_transition_probs_backward", (Gradient, Arguments), ["grad_logits"], fake=_fake_backward)
define_triton("log_transition_probs")
define_triton("log_transition_probs_backward")


def log_transition_probs(
    logits: torch.Tensor,
    log_transition: torch.Tensor,
    *,
    groups: torch.Tensor | None = None,
    log_marginal: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probability of every set for every sample: log of A p / sum(A p), p = softmax(logits).

    Args:
        logits, log_transition, groups, log_marginal: as in :func:`transition_nll`.

    Returns:
        log g ``[B, M]``, float32 (float64 for float64 logits), differentiable with respect to logits (a
        second derivative raises RuntimeError). A set with a row of -inf, such as a padded set of a small
        group, has -inf and passes no gradient. Logits of
        -inf throughout give NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`transition_nll`; shares are refused in any row of
            log_transition.

    Source: Lu et al. 2022 (FedUL), Theorem 1.

    Equivalent to (``[M, K]``)::

        sets = (logits[:, None, :] + log_transition).logsumexp(2)
        sets - (logits + log_transition.logsumexp(0)).logsumexp(1, keepdim=True)
    """
    matrix, marginal = check_transition("log_transition_probs", logits, log_transition, groups, log_marginal)
    call = (
        _LogTransitionProbs.apply
        if needs_gradient_without_vmap("log_transition_probs", logits)
        else resolve("log_transition_probs", logits)
    )
    log_g: torch.Tensor = call(*Arguments(logits, matrix, marginal, groups))
    return log_g


def transition_double_softmax(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_transition: torch.Tensor,
    *,
    groups: torch.Tensor | None = None,
    log_marginal: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Compute the loss of FedUL's published code, which takes the softmax of probabilities.

    The loss is -g[target] + log sum exp(g).

    The loss is bounded and not proper: its minimizer is not the posterior of the classes. Use it only to
        reproduce published results, and :func:`transition_nll` for everything else. The loss has no kernel of
        its own. It uses :func:`log_transition_probs` and PyTorch's cross-entropy, and is slower on a training
        batch than the plain product of probabilities (docs/design/learning-from-sets.md).

    In a batch of groups with different numbers of sets, the sets that a group lacks count neither in g nor in
    the sum.

    Args:
        logits, targets, log_transition, groups, log_marginal, ignore_index: as in :func:`transition_nll`.

    Returns:
        loss ``[B]``, float32 (float64 for float64 logits), differentiable once with respect to logits.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`transition_nll`; the targets are checked on the CPU and
            outside ``torch.compile``. Otherwise PyTorch's ``cross_entropy`` gets a target out of range.

    Source: the code that accompanies Lu et al. 2022 (FedUL).

    Equivalent to (``[M, K]``)::

        g = log_transition_probs(logits, log_transition).exp()
        F.cross_entropy(g, targets, reduction="none", ignore_index=ignore_index)
    """
    op = "transition_double_softmax"
    matrix, marginal = check_transition(op, logits, log_transition, groups, log_marginal)
    ignore_index = check_targets(op, targets, ignore_index, logits)
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        require_matrix(op, marginal)
        group = require_groups(op, groups, logits.shape[0], matrix)
        require_rows(op, targets, targets == ignore_index, group, matrix)
    log_g = log_transition_probs(logits, log_transition, groups=groups, log_marginal=log_marginal)
    g = log_g.exp()
    if groups is not None:
        g = g.masked_fill((log_transition == -torch.inf).all(2)[groups], -torch.inf)
    return torch.nn.functional.cross_entropy(g, targets, reduction="none", ignore_index=ignore_index)
