"""``fsq`` in Triton: one program for a block of rows.

The tests compile and interpret the kernels. The kernels have not run on a GPU yet.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import torch
import triton
import triton.language as tl

from .composed import Arguments, FsqGradient, tables

_ROWS = 256  # rows of a program, or elements in the backward pass


@triton.jit(do_not_specialize=["n", "width", "d"])
def _fsq(
    z,
    thresholds,
    values,
    levels,
    factors,
    quantized,
    indices,
    n: tl.int64,
    width,
    d,
    INDEXED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    index = tl.zeros((ROWS,), tl.int64)
    for j in range(d):
        x = tl.load(z + row * d + j, mask=inside, other=0.0)
        level = tl.zeros((ROWS,), tl.int32)
        for k in range(tl.load(levels + j).to(tl.int32) - 1):
            level += (x >= tl.load(thresholds + j * (width - 1) + k)).to(tl.int32)
        value = tl.load(values + j * width + level)
        tl.store(quantized + row * d + j, tl.where(x == x, value, x), mask=inside)
        index += level.to(tl.int64) * tl.load(factors + j)
    if INDEXED:
        tl.store(indices + row, index.to(indices.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "d"])
def _fsq_backward(
    grad, z, shift, slope, grad_z, count: tl.int64, d, CLAMP: tl.constexpr, ELEMENTS: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = i < count
    j = i % d
    x = tl.load(z + i, mask=inside, other=0.0) + tl.load(shift + j)
    pull = tl.load(grad + i, mask=inside, other=0.0) * tl.load(slope + j)
    if CLAMP:
        pull = pull * (tl.abs(x) <= 1).to(x.dtype)
    else:
        e = tl.exp(-2 * tl.abs(x))  # 1 - tanh^2 x = 4 e / (1 + e)^2
        pull = pull * (4 * e / ((1 + e) * (1 + e)))
    tl.store(grad_z + i, pull, mask=inside)


def fsq(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the quantized elements, and the indices."""
    z, form = given.z.contiguous(), given.form
    table = tables(form, z.dtype, z.device)
    quantized, d = torch.empty_like(z), len(form.levels)
    n = z.numel() // d
    indices = z.new_empty(z.shape[:-1] if given.indexed else (0,), dtype=form.index_dtype)
    if n:
        with torch.cuda.device_of(z):
            _fsq[(triton.cdiv(n, _ROWS),)](
                z, *table[:4], quantized, indices, n, max(form.levels), d, given.indexed, _ROWS
            )
    return quantized, indices


def fsq_backward(given: FsqGradient) -> torch.Tensor:
    """Return the gradient with respect to z."""
    z, form = given.z.contiguous(), given.form
    table = tables(form, z.dtype, z.device)
    grad_z = torch.empty_like(z)
    if z.numel():
        with torch.cuda.device_of(z):
            _fsq_backward[(triton.cdiv(z.numel(), 4 * _ROWS),)](
                given.grad.contiguous(), z, table.shift, table.slope, grad_z, z.numel(), len(form.levels),
                form.clamp, 4 * _ROWS,
            )  # fmt: skip
    return grad_z
