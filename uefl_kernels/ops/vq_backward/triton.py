"""``vq_backward`` in Triton, under ``TRITON_INTERPRET=1`` also on CPU tensors.

The tests compile and interpret the kernel. Small cases gave correct results on an H100; no times were
measured.

A program takes a few segments and reads their elements once. For the rotation, it reads them twice: first
for the five dot products, in float64, then for the result. The second reading finds the elements in the
cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
from typing import Any

import torch
import triton
import triton.language as tl

from . import Arguments

_ROWS, _ELEMENTS = 16, 64
# Run-time values: a new N or stride does not recompile. Triton specializes only the strides of
# an element, because they are nearly always 1.
_SHAPE = ["outputs", "inner", "segments", "codebooks", "k", "d", "x_a", "x_b", "g_a", "g_b", "out_a", "out_b"]


@triton.jit
def _begin(row, inner, segment, d, stride_a, stride_b, stride_d):
    """Return the place where a segment of a row begins in an array [A, B, D]."""
    return ((row // inner) * stride_a + (row % inner) * stride_b + segment * d * stride_d)[:, None]


@triton.jit
def _rotation(
    x, codebook, g, at_x, at_code, at_g, live, known, d, x_d, g_d, ROWS: tl.constexpr, ELEMENTS: tl.constexpr
):
    """Return the factors [ROWS, 1] of the gradient, of x and of the codeword in the rotated gradient."""
    elements = tl.arange(0, ELEMENTS)
    xx, qq, xq = (tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64))
    xg, qg = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    for start in range(0, d, ELEMENTS):
        j = (start + elements)[None, :]
        inside = live & (j < d)
        value = tl.load(x + at_x + j * x_d, mask=inside, other=0.0).to(tl.float64)
        code = tl.where(
            known, tl.load(codebook + at_code + j, mask=inside & known, other=0.0), float("nan")
        ).to(tl.float64)
        gradient = tl.load(g + at_g + j * g_d, mask=inside, other=0.0).to(tl.float64)
        xx += tl.sum(value * value, 1)
        qq += tl.sum(code * code, 1)
        xq += tl.sum(value * code, 1)
        xg += tl.sum(value * gradient, 1)
        qg += tl.sum(code * gradient, 1)
    # rotation() of csrc/common/rotation.h
    q_norm = tl.sqrt(qq)
    x_scale, q_scale = 1 / tl.maximum(tl.sqrt(xx), 1e-6), 1 / tl.maximum(q_norm, 1e-6)
    sum_g = xg * x_scale + qg * q_scale
    sum_sum = xx * x_scale * x_scale + 2 * xq * x_scale * q_scale + qq * q_scale * q_scale
    ratio, mirror = q_norm * x_scale, sum_g / tl.maximum(sum_sum, 1e-12)
    scale = ratio[:, None]
    along = (2 * ratio * x_scale * (qg * q_scale - mirror))[:, None]
    towards = (-2 * ratio * q_scale * mirror)[:, None]
    return scale, along, towards


@triton.jit(do_not_specialize=_SHAPE)
def _backward(
    x,
    codebook,
    indices,
    g,
    pull,
    out,
    outputs: tl.int64,
    inner: tl.int64,
    segments: tl.int64,
    codebooks: tl.int64,
    k: tl.int64,
    d: tl.int64,
    x_a: tl.int64,
    x_b: tl.int64,
    x_d: tl.int64,
    g_a: tl.int64,
    g_b: tl.int64,
    g_d: tl.int64,
    out_a: tl.int64,
    out_b: tl.int64,
    out_d: tl.int64,
    HAS_G: tl.constexpr,
    ROTATION: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Compute out = scale g + pull (x - q) + along x + towards q, as in csrc/cpu/vq_backward.h."""
    output = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, segment = output // segments, output % segments
    index = tl.load(indices + output, mask=output < outputs, other=0)
    at_x = _begin(row, inner, segment, d, x_a, x_b, x_d)
    at_g = _begin(row, inner, segment, d, g_a, g_b, g_d)
    at_out = _begin(row, inner, segment, d, out_a, out_b, out_d)
    at_code = ((segment % codebooks * k + index) * d)[:, None]
    elements = tl.arange(0, ELEMENTS)
    live = (output < outputs)[:, None]
    known = ((index >= 0) & (index < k))[:, None]
    strength = tl.load(pull).to(WIDE)

    if ROTATION:
        scale, along, towards = _rotation(
            x, codebook, g, at_x, at_code, at_g, live, known, d, x_d, g_d, ROWS, ELEMENTS
        )
    for start in range(0, d, ELEMENTS):
        j = (start + elements)[None, :]
        inside = live & (j < d)
        value = tl.load(x + at_x + j * x_d, mask=inside, other=0.0).to(WIDE)
        code = tl.where(
            known, tl.load(codebook + at_code + j, mask=inside & known, other=0.0), float("nan")
        ).to(WIDE)
        result = (value - code) * strength
        if HAS_G:
            gradient = tl.load(g + at_g + j * g_d, mask=inside, other=0.0).to(WIDE)
            if ROTATION:
                gradient = gradient * scale + (value * along + code * towards)
            result = gradient + result
        if out.dtype.element_ty.primitive_bitwidth == 16:
            result = result.to(tl.float32)  # as torch rounds float64
        tl.store(out + at_out + j * out_d, result.to(out.dtype.element_ty), mask=inside)


def vq_backward(given: Arguments) -> torch.Tensor:
    """Return the gradient with respect to x."""
    x, codebook, indices, grad_quantized, pull, rotation = given
    out = torch.empty_like(x)
    outputs = indices.numel()
    if outputs == 0:
        return out
    k, d = codebook.shape[-2:]
    s = indices.shape[-1]
    has_g = grad_quantized is not None
    rows, g = _rows(x), _rows(grad_quantized if grad_quantized is not None else x)
    written = _rows(out)  # a copy where two strides cannot describe it
    rotation = rotation and has_g
    wide = rotation or torch.float64 in (x.dtype, codebook.dtype)
    shape: tuple[Any, ...] = (
        outputs,
        rows.shape[1],
        s,
        codebook.numel() // (k * d),
        k,
        d,
        *rows.stride(),
        *g.stride(),
        *written.stride(),
    )
    with torch.cuda.device_of(x):
        _backward[(triton.cdiv(outputs, _ROWS),)](
            rows,
            codebook.contiguous(),
            indices.contiguous(),
            g,
            pull,
            written,
            *shape,
            has_g,
            rotation,
            tl.float64 if wide else tl.float32,
            _ROWS,
            _ELEMENTS,
            enable_fp_fusion=False,
        )
    return out if written.data_ptr() == out.data_ptr() else out.copy_(written.view(x.shape))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return [A, B, D]: a view of dense, channels-first and transposed layouts.

    The result is a copy if two strides cannot describe the tensor.
    """
    return tensor.flatten(1, -2) if tensor.dim() > 2 else tensor.reshape(1, -1, tensor.shape[-1])
