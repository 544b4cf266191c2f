"""What follows the search in ``vq``, in Triton: gather, loss, counts and sums in one pass over x, two when the sums are asked for.

The sums need the largest value of each codeword's rows before the first addition (see ``reference.code_sums``): hence the second pass.
Everything that programs add to in any order is an integer, and the losses of the programs are added by torch in a fixed order, so the
result has the same bits at every run. Interpreted and compiled in the tests; not run on a GPU yet.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import torch
import triton
import triton.language as tl

from ..vq_assign.triton import _begin, _rows
from . import reference

# Rows and at most so many elements of a tile; not tuned on a GPU yet.
_ROWS, _ELEMENTS = 64, 64
_SHAPE = ["outputs", "outer", "segments", "books", "k"]


@triton.jit
def _value(x, begin, valid, start, stride_d, D: tl.constexpr, ELEMENTS: tl.constexpr):
    """Elements [start, start + ELEMENTS) of the rows in float64, and which of them there are."""
    j = start + tl.arange(0, ELEMENTS)
    inside = valid[:, None] & (j < D)[None, :]
    return tl.load(x + begin[:, None] + j[None, :] * stride_d, mask=inside, other=0.0).to(tl.float64), inside, j


@triton.jit(do_not_specialize=_SHAPE)
def _replace(
    x, codebook, codes, indices, quantized, errors, counts, largest,
    outputs: tl.int64, outer: tl.int64, segments: tl.int64, books: tl.int64, k: tl.int64,
    stride_a: tl.int64, stride_b: tl.int64, stride_d: tl.int64,
    SUMS: tl.constexpr, FLAT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """quantized = codes[indices] (codes: the codebook in the dtype of x); errors[program] = sum of (x - codeword)^2; counts and
    largest [books * k]: how many rows, and their largest |x| as the bits of a double, infinity for a row that is not finite."""
    output = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = output < outputs
    book = output % books
    begin = _begin(output, book, segments, books, outer, stride_a, stride_b, stride_d, FLAT, D)
    code = book * k + tl.load(indices + output, mask=valid, other=0)
    error, peak = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    for start in tl.range(0, D, ELEMENTS):
        value, inside, j = _value(x, begin, valid, start, stride_d, D, ELEMENTS)
        place = code[:, None] * D + j[None, :]
        tl.store(quantized + output[:, None] * D + j[None, :], tl.load(codes + place, mask=inside, other=0.0), mask=inside)
        difference = value - tl.load(codebook + place, mask=inside, other=0.0).to(tl.float64)
        error += tl.sum(difference * difference, 1)
        if SUMS:
            magnitude = tl.abs(value)
            peak = tl.maximum(peak, tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1))
    tl.store(errors + tl.program_id(0), tl.sum(error, 0))
    tl.atomic_add(counts + code, tl.full((ROWS,), 1, tl.int64), mask=valid, sem="relaxed")
    if SUMS:
        tl.atomic_max(largest + code, peak.to(tl.int64, bitcast=True), mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=_SHAPE)
def _add(
    x, indices, scales, fixed,
    outputs: tl.int64, outer: tl.int64, segments: tl.int64, books: tl.int64, k: tl.int64,
    stride_a: tl.int64, stride_b: tl.int64, stride_d: tl.int64,
    FLAT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """fixed[books * k, D] += round(x * scale of the codeword), ties to even; a scale of 0 leaves the rows of a codeword out."""
    output = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = output < outputs
    book = output % books
    begin = _begin(output, book, segments, books, outer, stride_a, stride_b, stride_d, FLAT, D)
    code = book * k + tl.load(indices + output, mask=valid, other=0)
    scale = tl.load(scales + code, mask=valid, other=0.0)
    valid = valid & (scale > 0)
    for start in tl.range(0, D, ELEMENTS):
        value, inside, j = _value(x, begin, valid, start, stride_d, D, ELEMENTS)
        scaled = value * scale[:, None]
        magnitude = tl.abs(scaled)
        # From 2^52 on a double is an integer; below, adding 2^52 rounds to one.
        units = tl.where(magnitude < 2.0**52, (magnitude + 2.0**52) - 2.0**52, magnitude).to(tl.int64)
        tl.atomic_add(fixed + code[:, None] * D + j[None, :], tl.where(scaled < 0, -units, units), mask=inside, sem="relaxed")


def compose(
    x: torch.Tensor, codebook: torch.Tensor, indices: torch.Tensor, with_sums: bool, codebook_weight: float, commitment_weight: float
) -> reference.Result:
    """As ``reference.compose``; the loss may differ from it in the last places, the rest does not."""
    k, d = codebook.shape[-2:]
    books, outputs, device = codebook.numel() // (k * d), indices.numel(), x.device
    if outputs == 0:
        return reference.compose(x, codebook, indices, with_sums, codebook_weight, commitment_weight)
    codebook = codebook.contiguous()
    rows, flat = _rows(x, codebook)
    shape = (outputs, rows.shape[1], x.shape[-1] // d, books, k, *rows.stride())
    tile = (flat, d, _ROWS, min(_ELEMENTS, 1 << (d - 1).bit_length()))
    grid = (triton.cdiv(outputs, _ROWS),)
    quantized = torch.empty(x.shape, dtype=x.dtype, device=device)
    errors = torch.empty(grid, dtype=torch.float64, device=device)
    counts, largest = torch.zeros(2, books * k, dtype=torch.int64, device=device)
    sums = torch.empty(0, dtype=torch.float64, device=device)
    with torch.cuda.device_of(x):
        _replace[grid](rows, codebook, codebook.to(x.dtype), indices, quantized, errors, counts, largest, *shape, with_sums, *tile)
        if with_sums:
            finite, shift = reference.fixed_point(largest.view(torch.float64), outputs)
            fixed = torch.zeros(books * k, d, dtype=torch.int64, device=device)
            scales = torch.where(finite, reference.power_of_two(shift), 0.0)
            _add[grid](rows, indices, scales, fixed, *shape, *tile)
            sums = reference.from_fixed_point(fixed, finite, shift).reshape(codebook.shape)
    loss = errors.sum() * ((codebook_weight + commitment_weight) / x.numel())
    return quantized, indices, loss.to(reference.loss_dtype(x)), counts.reshape(codebook.shape[:-1]), sums
