"""``log_transition_probs`` and its gradient in Triton.

See ``transition_nll/triton.py``. Not run on a GPU yet.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import torch
import triton
import triton.language as tl

from ..._dtypes import result_dtype
from ..transition_nll.triton import SHAPE, largest, log_sum_exp, tile
from . import Arguments, Gradient


@triton.jit(do_not_specialize=SHAPE)
def _probs(
    logits,
    matrix,
    marginal,
    groups,
    out,
    g: tl.int64,
    m: tl.int64,
    k,
    stride_b: tl.int64,
    stride_k: tl.int64,
    GROUPED: tl.constexpr,
    WIDE: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * stride_b
    group = tl.load(groups + row) if GROUPED else tl.zeros((), tl.int64)
    inside = (group >= 0) & (group < g)
    group = tl.where(inside, group, 0)
    off = largest(z, marginal + group * k, k, stride_k, WIDE, CLASSES)
    every = log_sum_exp(z, off, marginal + group * k, k, stride_k, WIDE, CLASSES)
    for i in range(0, m):
        own = log_sum_exp(z, off, matrix + (group * m + i) * k, k, stride_k, WIDE, CLASSES)
        tl.store(out + row * m + i, tl.where(inside, own - every, float("nan")))


@triton.jit(do_not_specialize=SHAPE)
def _probs_backward(
    grad,
    logits,
    matrix,
    marginal,
    groups,
    gradient,
    g: tl.int64,
    m: tl.int64,
    k,
    stride_b: tl.int64,
    stride_k: tl.int64,
    GROUPED: tl.constexpr,
    WIDE: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """Compute one tile of classes of one row.

    Each tile computes the log-sum-exp of a set again.
    """
    tiles, program = tl.cdiv(k, CLASSES), tl.program_id(0).to(tl.int64)
    row, j = program // tiles, (program % tiles).to(tl.int32) * CLASSES + tl.arange(0, CLASSES)
    z = logits + row * stride_b
    group = tl.load(groups + row) if GROUPED else tl.zeros((), tl.int64)
    inside = (group >= 0) & (group < g)
    group = tl.where(inside, group, 0)
    off = largest(z, marginal + group * k, k, stride_k, WIDE, CLASSES)
    score = tl.load(z + j.to(tl.int64) * stride_k, mask=j < k, other=0.0).to(WIDE) - off
    slope = tl.zeros((CLASSES,), WIDE)
    counted = tl.full((), 0.0, WIDE)
    for i in range(0, m):
        weights = matrix + (group * m + i) * k
        own = log_sum_exp(z, off, weights, k, stride_k, WIDE, CLASSES)
        there = own != float("-inf")  # else the set is not, and has no gradient
        share = tl.where(there, tl.load(grad + row * m + i).to(WIDE), 0.0)
        with_own = score + tl.load(weights + j, mask=j < k, other=0.0)
        slope += tl.where(there, share * tl.exp(with_own - own), 0.0)
        counted += share
    every = log_sum_exp(z, off, marginal + group * k, k, stride_k, WIDE, CLASSES)
    slope -= counted * tl.exp(score + tl.load(marginal + group * k + j, mask=j < k, other=0.0) - every)
    tl.store(
        gradient + row * k + j,
        tl.where(inside, slope, float("nan")).to(gradient.dtype.element_ty),
        mask=j < k,
    )


def log_transition_probs(given: Arguments) -> torch.Tensor:
    """Return log g.

    Values are not checked.
    """
    logits, log_transition, log_marginal, groups = given
    g, m, k = log_transition.shape
    wide = result_dtype(logits)
    out = logits.new_empty(logits.shape[0], m, dtype=wide)
    matrix, marginal = log_transition.to(wide).contiguous(), log_marginal.to(wide).contiguous()
    of_row = matrix if groups is None else groups.contiguous()
    if out.numel():
        with torch.cuda.device_of(logits):
            _probs[(logits.shape[0],)](
                logits,
                matrix,
                marginal,
                of_row,
                out,
                g,
                m,
                k,
                *logits.stride(),
                groups is not None,
                *tile(logits),
            )
    return out


def log_transition_probs_backward(gradient: Gradient, given: Arguments) -> torch.Tensor:
    """Return the gradient with respect to the logits.

    Values are not checked.
    """
    logits, log_transition, log_marginal, groups = given
    g, m, k = log_transition.shape
    wide = result_dtype(logits)
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    matrix, marginal = log_transition.to(wide).contiguous(), log_marginal.to(wide).contiguous()
    of_row = matrix if groups is None else groups.contiguous()
    if grad_logits.numel():
        computed_in, classes = tile(logits)
        with torch.cuda.device_of(logits):
            _probs_backward[(logits.shape[0] * triton.cdiv(k, classes),)](
                gradient.grad.contiguous(),
                logits,
                matrix,
                marginal,
                of_row,
                grad_logits,
                g,
                m,
                k,
                *logits.stride(),
                groups is not None,
                computed_in,
                classes,
            )
    return grad_logits
