"""Work on the rows of a tile as soon as their codewords are known: ``Epilogue`` selects it.

The kernel reads x again while x is in the cache, so x moves from device memory once. Programs add integers to
counts and sums, and each program has a place for its part of the loss, so each run gives the same bits. The
search marks the rows that its first phase does not certify as open; ``_finish_open`` finishes them. The tests
interpret and compile the kernels. Small cases gave correct results on an H100; no times were measured.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Elements of a row at a time: a float64 tile has to fit into the registers. Rows of a program of
# _finish_open.
_ELEMENTS, _OPEN_ROWS = 16, 32


class Epilogue(NamedTuple):
    """The requested results.

    The results that are not requested are None. C is the number of codewords of all codebooks.
    """

    counts: torch.Tensor | None = None
    """``[C]`` int64, zeroed: the number of rows; with ``mass_scale``, the sum of round(weight * mass_scale)
    over the rows (weight 1 without weights)"""
    codewords: torch.Tensor | None = None
    """``[C, d]``: the codewords, for ``quantized [outputs, d]``; ``rounded`` has them in the dtype of x, if
    this is another dtype"""
    rounded: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    """``[C, d]`` int64, zeroed: the sum of rounded x * scales, with a scale for each codeword; with
    ``middle``, of rounded (x - middle) * weight * scales, with a scale for each column"""
    scales: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    """``[C]`` int64, zeroed: the largest |x| as the bits of a double, infinity if a row is not finite"""
    middle: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    mass_scale: torch.Tensor | None = None


@triton.jit
def _begin(
    output,
    codebook,
    segments,
    codebooks,
    outer,
    stride_a,
    stride_b,
    stride_d,
    FLAT: tl.constexpr,
    D: tl.constexpr,
):
    """Return the place in x where an output begins.

    With FLAT, x is [outputs / codebooks, codebooks * D], otherwise [A, B, segments * D].
    """
    if FLAT:
        return (output // codebooks) * stride_b + codebook * D * stride_d
    row = output // segments
    return (row // outer) * stride_a + (row % outer) * stride_b + output % segments * D * stride_d


@triton.jit
def _fixed(value):
    """Round to int64, ties to even.

    From 2^52 on a double is an integer; below, adding 2^52 rounds to one.
    """
    magnitude = tl.abs(value)
    units = tl.where(magnitude < 2.0**52, (magnitude + 2.0**52) - 2.0**52, magnitude)
    # larger values and NaN: the caller computes these sums again in another unit
    units = tl.where(units < 2.0**62, units, 2.0**62).to(tl.int64)
    return tl.where(value < 0, -units, units)


@triton.jit
def _finish(
    x,
    begin,
    valid,
    output,
    code,
    stride_d,
    counts,
    codewords,
    rounded,
    quantized,
    sums,
    scales,
    largest,
    middle,
    weights,
    mass_scale,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Write the valid rows of a tile, given output and code of each.

    Return the sum of (x - codeword)^2, or 0.
    """
    weight = tl.full((ROWS,), 1.0, tl.float64)
    if weights is not None:
        weight = tl.load(weights + output, mask=valid, other=0.0)
    mass = tl.full((ROWS,), 1, tl.int64)
    if mass_scale is not None:
        mass = _fixed(weight * tl.load(mass_scale))
    tl.atomic_add(counts + code, mass, mask=valid, sem="relaxed")

    error, peak = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    for start in tl.range(0, D, ELEMENTS):
        j = start + tl.arange(0, ELEMENTS)
        inside = valid[:, None] & (j < D)[None, :]
        value = tl.load(x + begin[:, None] + j[None, :] * stride_d, mask=inside, other=0.0).to(tl.float64)
        place = code[:, None] * D + j[None, :]
        if quantized is not None:
            target = tl.load(codewords + place, mask=inside, other=0.0)
            taken = target
            if rounded is not None:
                taken = tl.load(rounded + place, mask=inside, other=0.0)
            tl.store(quantized + output[:, None] * D + j[None, :], taken, mask=inside)
            difference = value - target.to(tl.float64)
            error += tl.sum(difference * difference, 1)
        if largest is not None:
            magnitude = tl.abs(value)
            peak = tl.maximum(peak, tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1))
        if sums is not None:
            if middle is not None:
                term = value - tl.load(middle + j, mask=j < D, other=0.0)[None, :]
                if weights is not None:
                    term = term * weight[:, None]
                term = term * tl.load(scales + j, mask=j < D, other=0.0)[None, :]
            else:
                term = value * tl.load(scales + code, mask=valid, other=0.0)[:, None]
            tl.atomic_add(sums + place, _fixed(term), mask=inside, sem="relaxed")
    if largest is not None:
        tl.atomic_max(largest + code, peak.to(tl.int64, bitcast=True), mask=valid, sem="relaxed")
    return tl.sum(error, 0)


@triton.jit(do_not_specialize=["outputs", "outer", "segments", "codebooks", "k", "first"])
def _finish_open(
    x,
    indices,
    opened,
    errors,
    counts,
    codewords,
    rounded,
    quantized,
    sums,
    scales,
    largest,
    middle,
    weights,
    mass_scale,
    outputs: tl.int64,
    outer: tl.int64,
    segments: tl.int64,
    codebooks: tl.int64,
    k,
    stride_a: tl.int64,
    stride_b: tl.int64,
    stride_d: tl.int64,
    first,
    FLAT: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Finish rows that the first phase left open.

    The parts of their loss begin at place ``first``.
    """
    output = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = tl.load(opened + output, mask=output < outputs, other=0) != 0
    if tl.max(valid.to(tl.int32), 0) > 0:
        codebook = output % codebooks
        begin = _begin(output, codebook, segments, codebooks, outer, stride_a, stride_b, stride_d, FLAT, D)
        code = codebook * k + tl.load(indices + output, mask=valid, other=0)
        error = _finish(
            x,
            begin,
            valid,
            output,
            code,
            stride_d,
            counts,
            codewords,
            rounded,
            quantized,
            sums,
            scales,
            largest,
            middle,
            weights,
            mass_scale,
            D,
            ROWS,
            ELEMENTS,
        )
        tl.store(errors + first + tl.program_id(0), error)
