"""The transition ops in Triton: a program for a row.

In ``log_transition_probs``, a program takes one set after the other.

Log-sum-exps over tiles of classes, accumulated online in float32 (float64 for float64 logits), so that K is
bounded by memory only. A target or a group out of range reads nothing and gives NaN. Compiled and interpreted
in the tests; right on an H100 in small cases, not timed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
from typing import Any

import torch
import triton
import triton.language as tl

from ..._dtypes import result_dtype
from . import Arguments

CLASSES = 128  # to a tile, at most
SHAPE = ["g", "m", "k", "ignore_index"]  # run-time values: another one does not recompile


@triton.jit
def largest(z, weights, k, stride, WIDE: tl.constexpr, CLASSES: tl.constexpr):
    """Return the largest z with a finite weight.

    It is subtracted before any sum, so that large logits lose no digits.

    NaN where any of z is NaN or +inf.
    """
    most = tl.full((), float("-inf"), WIDE)
    wrong = tl.full((), 0.0, WIDE)
    for start in range(0, k, CLASSES):
        j = start + tl.arange(0, CLASSES)
        value = tl.load(z + j.to(tl.int64) * stride, mask=j < k, other=float("-inf")).to(WIDE)
        wrong += tl.sum(tl.where(value < float("inf"), 0.0, 1.0), 0)
        there = tl.load(weights + j, mask=j < k, other=float("-inf")) > float("-inf")
        most = tl.maximum(most, tl.max(tl.where(there, value, float("-inf")), 0))
    return tl.where(wrong > 0, float("nan"), tl.where(most == float("-inf"), 0.0, most))


@triton.jit
def log_sum_exp(z, off, weights, k, stride, WIDE: tl.constexpr, CLASSES: tl.constexpr):
    """Compute the log of the sum over k of exp(z[k * stride] - off + weights[k]).

    The result is -inf if all are -inf, NaN if off is.
    """
    most = tl.full((), float("-inf"), WIDE)
    total = tl.full((), 0.0, WIDE)
    for start in range(0, k, CLASSES):
        j = start + tl.arange(0, CLASSES)
        value = tl.load(z + j.to(tl.int64) * stride, mask=j < k, other=float("-inf")).to(WIDE) - off
        value += tl.load(weights + j, mask=j < k, other=float("-inf"))
        highest = tl.maximum(most, tl.max(value, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(value - shift), 0)
        most = highest
    return tl.where(off == off, tl.where(most == float("-inf"), 0.0, most) + tl.log(total), float("nan"))


@triton.jit(do_not_specialize=SHAPE)
def _nll(
    logits,
    targets,
    matrix,
    marginal,
    groups,
    loss,
    gradient,
    g: tl.int64,
    m: tl.int64,
    k,
    ignore_index: tl.int64,
    stride_b: tl.int64,
    stride_k: tl.int64,
    GROUPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    WIDE: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z, target = logits + row * stride_b, tl.load(targets + row)
    group = tl.load(groups + row) if GROUPED else tl.zeros((), tl.int64)
    ignored = target == ignore_index
    inside = (target >= 0) & (target < m) & (group >= 0) & (group < g)
    group, target = tl.where(inside, group, 0), tl.where(inside, target, 0)
    all_weights, own_weights = marginal + group * k, matrix + (group * m + target) * k
    off = largest(z, all_weights, k, stride_k, WIDE, CLASSES)
    every = log_sum_exp(z, off, all_weights, k, stride_k, WIDE, CLASSES)
    own = log_sum_exp(z, off, own_weights, k, stride_k, WIDE, CLASSES)
    value = tl.where(inside, every - own, float("nan"))
    tl.store(loss + row, tl.where(ignored, 0.0, value))
    if GRADIENT:
        bad = (value != value) | (value == float("inf"))
        for start in range(0, k, CLASSES):
            j = start + tl.arange(0, CLASSES)
            score = tl.load(z + j.to(tl.int64) * stride_k, mask=j < k, other=0.0).to(WIDE) - off
            with_all = score + tl.load(all_weights + j, mask=j < k, other=0.0)
            with_own = score + tl.load(own_weights + j, mask=j < k, other=0.0)
            slope = tl.where(bad, float("nan"), tl.exp(with_all - every) - tl.exp(with_own - own))
            tl.store(
                gradient + row * k + j,
                tl.where(ignored, 0.0, slope).to(gradient.dtype.element_ty),
                mask=j < k,
            )


def transition_nll(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient.

    Values are not checked.
    """
    logits, targets, log_transition, log_marginal, groups, ignore_index, with_gradient = given
    b, k = logits.shape
    wide = result_dtype(logits)
    loss = logits.new_empty(b, dtype=wide)
    gradient = torch.empty(logits.shape if with_gradient else (0,), dtype=logits.dtype, device=logits.device)
    if b:
        matrix, marginal = log_transition.to(wide).contiguous(), log_marginal.to(wide).contiguous()
        of_row = targets if groups is None else groups.contiguous()
        with torch.cuda.device_of(logits):
            _nll[(b,)](
                logits,
                targets.contiguous(),
                matrix,
                marginal,
                of_row,
                loss,
                gradient,
                matrix.shape[0],
                matrix.shape[1],
                k,
                ignore_index,
                *logits.stride(),
                groups is not None,
                with_gradient,
                *tile(logits),
            )
    return loss, gradient


def tile(logits: torch.Tensor) -> tuple[Any, int]:
    """Return the dtype of the computation and the classes per tile.

    The tile is a power of two, so that a new K rarely compiles a new kernel.
    """
    wide = tl.float64 if logits.dtype == torch.float64 else tl.float32
    return wide, min(CLASSES, triton.next_power_of_2(logits.shape[1]))
