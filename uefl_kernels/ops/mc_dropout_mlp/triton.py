"""The Triton kernel of ``mc_dropout_mlp`` for tails of one layer (or of none), and of its masks. Not run on a GPU yet.

Deeper tails and more than 256 classes are left to CUDA C++ (``csrc/cuda/mc_dropout_mlp*``), or to the reference where that is not built.

A program has ROWS rows for all passes: in each pass it draws the masks of UNITS units at a time, multiplies what they keep by the
weights, and adds the probabilities to statistics in registers. Nothing of the size of the passes, or of the masks, is in memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..._library import forced
from . import reference

_ROWS, _UNITS = 64, 32  # rows of a program, units of a step: a multiple of 8
_MOST_CLASSES = 256
_PROGRAMS = {"num_warps": 4}


@triton.jit
def _bits(seed, row, column, pass_, stream):
    """16 random bits of each unit, as ops/mc_dropout_mlp/reference.py draws them; row, column: int32, broadcast."""
    zero = row * 0 + column * 0
    block = zero + column // 8
    word0, word1, word2, word3 = tl.philox(seed, zero + pass_, zero + row, zero + stream, block)
    which = column % 8 // 2
    low = tl.where(which == 0, word0, word1)
    high = tl.where(which == 2, word2, word3)
    word = tl.where(which < 2, low, high).to(tl.uint32, bitcast=True)
    return (word >> (column % 2 * 16).to(tl.uint32)) & 0xFFFF


@triton.jit
def _mask(seed, keep, rows, columns, pass_, stream, threshold, CONSISTENT: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * UNITS + tl.arange(0, UNITS))[None, :]
    bits = _bits(tl.load(seed), row * 0 if CONSISTENT else row, column, pass_, stream)
    inside = (row < rows) & (column < columns)
    tl.store(keep + row.to(tl.int64) * columns + column, bits >= threshold, mask=inside)


@triton.jit
def _statistics(
    x,
    weights,
    bias,
    seed,
    mean_out,
    entropy_out,
    variance_out,
    rows,
    inputs,
    classes,
    row_stride,
    column_stride,
    passes,
    threshold,
    logit_threshold,
    scale,
    logit_scale,
    CONSISTENT: tl.constexpr,
    LAYERS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    counter = row * 0 if CONSISTENT else row
    unit = tl.arange(0, UNITS)
    column = tl.arange(0, CLASSES)[None, :]
    key = tl.load(seed)
    is_class = column < classes
    inside = (row < rows) & is_class
    mean = tl.zeros((ROWS, CLASSES), tl.float32)
    moment = tl.zeros((ROWS, CLASSES), tl.float32)
    entropy = tl.zeros((ROWS, 1), tl.float32)
    for t in range(passes):
        if LAYERS == 1:
            logits = tl.zeros((ROWS, CLASSES), tl.float32) + tl.load(bias + column, mask=is_class, other=0.0)
            for start in range(0, inputs, UNITS):
                at = start + unit
                there = (row < rows) & (at[None, :] < inputs)
                value = tl.load(x + row.to(tl.int64) * row_stride + at[None, :] * column_stride, mask=there, other=0.0).to(tl.float32)
                if threshold > 0:
                    value = tl.where(_bits(key, counter, at[None, :], t, 0) >= threshold, value * scale, 0.0)
                weight = tl.load(weights + column * inputs + at[:, None], mask=is_class & (at[:, None] < inputs), other=0.0)
                logits = tl.dot(value, weight, logits, input_precision="ieee")
        else:
            logits = tl.load(x + row.to(tl.int64) * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
        if logit_threshold > 0:
            logits = tl.where(_bits(key, counter, column, t, LAYERS) >= logit_threshold, logits * logit_scale, 0.0)
        logits = tl.where(is_class, logits, float("-inf"))
        below = logits - tl.max(logits, 1, keep_dims=True)
        powers = tl.exp(below)
        total = tl.sum(powers, 1, keep_dims=True)
        probs = powers / total
        entropy += tl.log(total) - tl.sum(tl.where(powers != 0, probs * below, 0.0), 1, keep_dims=True)
        deviation = probs - mean
        mean += deviation / (t + 1)
        moment += deviation * (probs - mean)
    place = row.to(tl.int64) * classes + column
    tl.store(mean_out + place, mean, mask=inside)
    tl.store(variance_out + place, moment / passes, mask=inside)
    tl.store(entropy_out + row, entropy / passes, mask=row < rows)


def dropout_mask(seed: torch.Tensor, rows: int, columns: int, pass_: int, stream: int, p: float, consistent: bool) -> torch.Tensor:
    """bool ``[rows, columns]``, the contract of ``reference.dropout_mask``."""
    keep = torch.empty(rows, columns, dtype=torch.bool, device=seed.device)
    if keep.numel() > 0:
        grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _UNITS))
        with torch.cuda.device_of(seed):
            _mask[grid](seed, keep, rows, columns, pass_, stream, reference.threshold(p), consistent, _ROWS, _UNITS, **_PROGRAMS)
    return keep


def mc_dropout_mlp(
    x: torch.Tensor,
    parameters: torch.Tensor,
    widths: Sequence[int],
    p: Sequence[float],
    passes: int,
    activation: str,
    consistent: bool,
    seed: torch.Tensor,
) -> reference.Stats:
    """The contract of ``ops/mc_dropout_mlp``; a tail of several layers, or of many classes, is left to the reference."""
    layers, classes = len(widths) - 1, widths[-1]
    if layers > 1 or classes > _MOST_CLASSES:
        if forced() == "triton":
            raise RuntimeError(
                f"mc_dropout_mlp: the Triton kernel takes one layer after the first dropout and at most {_MOST_CLASSES} classes, got"
                f" {layers} layers and {classes} classes; use backend 'auto' or 'reference'"
            )
        return reference.mc_dropout_mlp(x, parameters, widths, p, passes, activation, consistent, seed)
    rows, inputs = x.shape
    mean, variance = (torch.empty(rows, classes, device=x.device) for _ in range(2))
    entropy = torch.empty(rows, device=x.device)
    if rows > 0:
        weights, bias = parameters[: classes * inputs], parameters[classes * inputs :]
        with torch.cuda.device_of(x):
            _statistics[(triton.cdiv(rows, _ROWS),)](
                x,
                weights if layers else parameters,
                bias if layers else parameters,
                seed,
                mean,
                entropy,
                variance,
                rows,
                inputs,
                classes,
                *x.stride(),
                passes,
                reference.threshold(p[0]) if layers else 0,
                reference.threshold(p[-1]),
                reference.scale(p[0]),
                reference.scale(p[-1]),
                consistent,
                layers,
                _ROWS,
                _UNITS,
                max(16, triton.next_power_of_2(classes)),
                **_PROGRAMS,
            )
    return mean, entropy, variance
