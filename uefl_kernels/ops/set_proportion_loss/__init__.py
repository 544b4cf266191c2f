"""``set_proportion_loss``: learning from label proportions, all sets in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._checks import check_sets, needs_gradient_without_vmap
from ..._dtypes import result_dtype
from ..._library import define, define_triton, once_differentiable, resolve


class Arguments(NamedTuple):
    """Arguments of the op."""

    logits: torch.Tensor
    """``[N, K]``"""
    offsets: torch.Tensor
    """``[S + 1]`` int64"""
    proportions: torch.Tensor
    """``[S, K]``"""
    with_gradient: bool


def _fake(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    logits = given.logits
    loss = logits.new_empty(len(given.proportions), dtype=result_dtype(logits))
    return loss, logits.new_empty(logits.shape if given.with_gradient else (0,))


class _SetProportionLoss(torch.autograd.Function):
    """The op with its gradient.

    See ``transition_nll``.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        logits, offsets, _, _ = given
        loss: torch.Tensor
        loss, gradient = resolve("set_proportion_loss", logits)(*given)
        ctx.save_for_backward(logits, offsets, gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, offsets, gradient = ctx.saved_tensors
        weight = grad_loss.repeat_interleave(offsets.diff(), output_size=gradient.shape[0])
        grad_logits = (gradient * weight[:, None]).to(gradient.dtype)
        return once_differentiable("set_proportion_loss", grad_logits, logits, grad_loss), None, None, None


define(__name__, "set_proportion_loss", Arguments, ["loss", "gradient"], fake=_fake)
define_triton("set_proportion_loss")


def set_proportion_loss(
    logits: torch.Tensor, offsets: torch.Tensor, proportions: torch.Tensor
) -> torch.Tensor:
    """Compute the cross-entropy between class proportions of sets and mean predictions.

    The proportions of each set are known. Its prediction is the mean of the predicted probabilities.

    Args:
        logits: ``[N, K]``, float32, bfloat16, float16 or float64; any strides; the rows of a set next to each
            other.
        offsets: ``[S + 1]`` int64: set s is the rows offsets[s] to offsets[s + 1]; the first is 0 and the
            last N.
        proportions: ``[S, K]``, float32 or float64, of at least 0, rows that sum to 1. A constant: it gets no
            gradient.

    Returns:
        loss ``[S]``, float32 (float64 for float64 logits), differentiable with respect to logits (a second
        derivative raises RuntimeError). Means and gradient
        are formed in log space, so a class that a set predicts with a probability below the smallest float is
        not lost. A proportion of zero contributes nothing. Logits with NaN or +inf, or of -inf throughout a
        row, make the results of their set NaN; a class with a positive proportion that is -inf in all rows of
        its set makes the loss +inf and the gradient NaN.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices that do not fit; more than 16384 classes in Triton.
        RuntimeError: on the CPU: offsets that do not cover the rows, an empty set, a proportion that is
            negative or not finite, proportions of a set that do not sum to 1 within 1e-3. On a GPU, where a
            check would stall the device, an empty set gives NaN, and proportions are taken as they are.

    Source: Ardehaly & Culotta 2017, "Co-training for Demographic Classification Using Deep Learning from
    Label Proportions", eq. 2; the loss of the baseline FedLLP in Lu et al. 2022.

    Equivalent to::

        for begin, end, t in zip(offsets[:-1], offsets[1:], proportions):
            -(t * logits[begin:end].softmax(1).mean(0).log()).sum()
    """
    check_sets(logits, offsets, proportions)
    with_gradient = needs_gradient_without_vmap("set_proportion_loss", logits)
    given = Arguments(logits, offsets, proportions, with_gradient)
    if not with_gradient:
        return resolve("set_proportion_loss", logits)(*given)[0]  # type: ignore[no-any-return]
    return _SetProportionLoss.apply(*given)  # type: ignore[no-any-return]
