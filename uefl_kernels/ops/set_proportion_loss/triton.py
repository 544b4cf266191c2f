"""``set_proportion_loss`` in Triton: one program for each set.

The tests compile and interpret the kernel; it has not run on a GPU yet.

Everything stays in log space, in float32 (float64 for float64 logits). Each row's log-sum-exp, each class's
log-sum-exp over the rows, then the gradient: rows are read three times, twice from the cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import torch
import triton
import triton.language as tl

from ..._dtypes import result_dtype
from . import Arguments

_ELEMENTS = 2048  # of a tile of rows and all classes
_MOST_CLASSES = 1 << 14  # a tile has all of them: beyond, registers are far too few


@triton.jit
def _log_probabilities(logits, row, end, j, k, stride_n, stride_k, WIDE: tl.constexpr):
    """Compute the log softmax of a tile of rows.

    The value is -inf outside, and NaN in a row that holds NaN or +inf.
    """
    inside = (row < end)[:, None] & (j < k)[None, :]
    z = tl.load(
        logits + row[:, None] * stride_n + j[None, :].to(tl.int64) * stride_k,
        mask=inside,
        other=float("-inf"),
    ).to(WIDE)
    most = tl.max(z, 1)
    shifted = z - tl.where(most == float("-inf"), 0.0, most)[:, None]
    shifted = tl.where(z == float("inf"), float("nan"), shifted)
    result = shifted - tl.log(tl.sum(tl.exp(shifted), 1))[:, None]
    return tl.where(inside, result, float("-inf"))


@triton.jit(do_not_specialize=["n", "k"])
def _loss(
    logits,
    offsets,
    proportions,
    loss,
    gradient,
    n: tl.int64,
    k,
    stride_n: tl.int64,
    stride_k: tl.int64,
    GRADIENT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    s, j = tl.program_id(0).to(tl.int64), tl.arange(0, CLASSES)
    # Offsets outside of the rows are clamped: nothing outside is read.
    begin = tl.minimum(tl.maximum(tl.load(offsets + s), 0), n)
    end = tl.minimum(tl.maximum(tl.load(offsets + s + 1), begin), n)
    share = tl.load(proportions + s * k + j, mask=j < k, other=0.0)
    most = tl.full((CLASSES,), float("-inf"), WIDE)
    total = tl.zeros((CLASSES,), WIDE)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        log_p = _log_probabilities(logits, row, end, j, k, stride_n, stride_k, WIDE)
        highest = tl.maximum(most, tl.max(log_p, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(log_p - shift[None, :]), 0)
        most = highest
    log_total = tl.where(most == float("-inf"), 0.0, most) + tl.log(total)
    rows = (end - begin).to(WIDE)
    term = tl.where(share == 0, 0.0, share * (log_total - tl.log(rows)))
    broken = tl.sum(tl.where((total != total) & (j < k), 1.0, 0.0), 0) > 0
    tl.store(loss + s, tl.where(broken | (end == begin), float("nan"), -tl.sum(term, 0)))
    if GRADIENT:
        for start in range(begin, end, ROWS):
            row = start + tl.arange(0, ROWS).to(tl.int64)
            log_p = _log_probabilities(logits, row, end, j, k, stride_n, stride_k, WIDE)
            pull = tl.where((share == 0)[None, :], 0.0, share[None, :] * tl.exp(log_p - log_total[None, :]))
            slope = tl.exp(log_p) * tl.sum(pull, 1)[:, None] - pull
            at = gradient + row[:, None] * k + j[None, :]
            tl.store(at, slope.to(gradient.dtype.element_ty), mask=(row < end)[:, None] & (j < k)[None, :])


def set_proportion_loss(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient, 0 for rows outside of all sets.

    Values are not checked.
    """
    logits, offsets, proportions, with_gradient = given
    n, k = logits.shape
    if k > _MOST_CLASSES:
        raise ValueError(
            f"set_proportion_loss: the Triton kernel takes at most {_MOST_CLASSES} classes, got {k}; use"
            " backend 'reference'"
        )
    wide = result_dtype(logits)
    loss = logits.new_empty(proportions.shape[0], dtype=wide)
    gradient = torch.zeros(logits.shape if with_gradient else (0,), dtype=logits.dtype, device=logits.device)
    classes = triton.next_power_of_2(k)
    computed_in = tl.float64 if wide == torch.float64 else tl.float32
    with torch.cuda.device_of(logits):
        _loss[(proportions.shape[0],)](
            logits,
            offsets.contiguous(),
            proportions.to(wide).contiguous(),
            loss,
            gradient,
            n,
            k,
            *logits.stride(),
            with_gradient,
            computed_in,
            max(1, _ELEMENTS // classes),
            classes,
        )
    return loss, gradient
