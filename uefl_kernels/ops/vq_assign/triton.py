"""``vq_assign`` in Triton, for the GPUs that ``csrc/cuda`` was not built for; under ``TRITON_INTERPRET=1`` also on CPU tensors.

Two passes. ``_search`` scores a tile of rows against every codeword in float32, keeps the best and the second best, and
leaves -1 for the rows whose gap is within the rounding error. ``_rescore`` evaluates those few in float64, the way the
reference does. Neither waits for the host nor stores a score. Compiled and interpreted in the tests; not run on a GPU yet.

Scores are half squared distances less a constant of the row: with y = x - mu, b = c - mu and mu the mean codeword,
|x - c|^2 / 2 - |y|^2 / 2 = |b|^2 / 2 - y.b, which keeps its digits when the data sit far from the origin. For cosine
mu = 0, c is the unit codeword and the score is -x.c.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# One tile of rows, codewords and elements; a tile of scores with its running best fits the registers of four warps.
_ROWS, _CODES, _ELEMENTS = 64, 64, 32
# Rows scanned for flags by one program of the second pass, and codewords that it evaluates at a time.
_SCAN, _CANDIDATES = 128, 128
# Run-time values: a new N, K or stride does not recompile. stride_d stays special, being 1 nearly always.
_SHAPE = ["outputs", "outer", "segments", "books", "d", "k", "stride_a", "stride_b"]


@triton.jit
def _begin(output, segments, outer, d, stride_a, stride_b, stride_d):
    """Where segment ``output % segments`` of row ``output // segments`` begins in x [A, B, D]."""
    row = output // segments
    return (row // outer) * stride_a + (row % outer) * stride_b + output % segments * d * stride_d


@triton.jit(do_not_specialize=_SHAPE)
def _search(
    x, mu, codes, half_norms, bounds, indices,
    outputs: tl.int64, outer: tl.int64, segments: tl.int64, books: tl.int64, d, k,
    stride_a: tl.int64, stride_b: tl.int64, stride_d: tl.int64,
    EXACT: tl.constexpr, L2: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """indices[row, segment] = the best codeword, or -1 when EXACT and the second best is too near to be sure."""
    program = tl.program_id(0).to(tl.int64)
    book = program % books
    # Output row * segments + segment: row m of the search in a codebook is every output, or every one of its segment.
    output = ((program // books) * ROWS + tl.arange(0, ROWS)) * books + book
    offset = _begin(output, segments, outer, d, stride_a, stride_b, stride_d)
    columns, elements = tl.arange(0, CODES), tl.arange(0, ELEMENTS)

    best = tl.full((ROWS, CODES), float("inf"), tl.float32)
    second = tl.full((ROWS, CODES), float("inf"), tl.float32)
    winner = tl.zeros((ROWS, CODES), tl.int32)
    square = tl.zeros((ROWS,), tl.float32)
    for first in range(0, k, CODES):
        code = first + columns
        dot = tl.zeros((ROWS, CODES), tl.float32)
        square = tl.zeros((ROWS,), tl.float32)
        for start in range(0, d, ELEMENTS):
            j = start + elements
            inside = (output < outputs)[:, None] & (j < d)[None, :]
            value = tl.load(x + offset[:, None] + j[None, :] * stride_d, mask=inside, other=0.0)
            mean = tl.load(mu + book * d + j, mask=j < d, other=0.0)[None, :]
            y = (value - mean.to(tl.float64)).to(tl.float32) if x.dtype.element_ty == tl.float64 else value - mean
            y = tl.where(inside, y, 0.0)
            b = tl.load(codes + (book * d + j[:, None]) * k + code[None, :], mask=(j < d)[:, None] & (code < k)[None, :], other=0.0)
            dot = tl.dot(y, b, dot, input_precision="ieee")
            square += tl.sum(y * y, 1)
        score = tl.load(half_norms + book * k + code, mask=code < k, other=float("inf"))[None, :] - dot
        # NaN compares false and never enters. The tiles are kept apart by column: one reduction per row, at the end.
        lower = score < best
        second = tl.where(lower, best, tl.where(score < second, score, second))
        winner = tl.where(lower, code[None, :], winner)
        best = tl.where(lower, score, best)

    least = tl.min(best, 1)
    index = tl.min(tl.where(best == least[:, None], winner, k - 1), 1)
    if EXACT:
        runner_up = tl.min(tl.where(columns[None, :] == (index % CODES)[:, None], second, best), 1)
        # score_error() of csrc/common/certificate.h, with an upper bound of |y|^2, which was summed in float32.
        half_square, radius = tl.load(bounds + 2 * book), tl.load(bounds + 2 * book + 1)
        total = square.to(tl.float64) * 1.01 + d * 2.0**-126
        norm = tl.sqrt(total)
        magnitude = half_square + norm * radius
        error = (d + 8) * (1.01 * 2.0**-24 * magnitude + 2.0**-125 * (1 + norm + radius))
        if L2:
            error += (d + 8) * 2.0**-53 * total
        gap = runner_up.to(tl.float64) - least.to(tl.float64)
        bounded = (magnitude < 2.0**126) & (norm < 2.0**126) & (d <= 65536)
        index = tl.where(bounded & (gap > 2 * error), index, -1)
    tl.store(indices + output, index.to(tl.int64), mask=output < outputs)


@triton.jit(do_not_specialize=_SHAPE)
def _rescore(
    x, codes, indices,
    outputs: tl.int64, outer: tl.int64, segments: tl.int64, books: tl.int64, d, k,
    stride_a: tl.int64, stride_b: tl.int64, stride_d: tl.int64,
    L2: tl.constexpr, SCAN: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Replace every -1 by the canonical answer. Launched without contraction to FMA, which would round differently."""
    scanned = tl.program_id(0).to(tl.int64) * SCAN + tl.arange(0, SCAN)
    flagged = tl.load(indices + scanned, mask=scanned < outputs, other=0) < 0
    pending = tl.where(flagged, scanned, outputs)
    output = tl.min(pending, 0)
    while output < outputs:
        offset = _begin(output, segments, outer, d, stride_a, stride_b, stride_d)
        book = output % segments % books
        best = tl.full((CODES,), float("inf"), tl.float64)
        winner = tl.zeros((CODES,), tl.int32)
        for first in range(0, k, CODES):
            code = first + tl.arange(0, CODES)
            total = tl.zeros((CODES,), tl.float64)
            for j in range(0, d):
                value = tl.load(x + offset + j * stride_d).to(tl.float64)
                c = tl.load(codes + (book * d + j) * k + code, mask=code < k, other=float("nan"))
                if L2:
                    total += (value - c) * (value - c)
                else:
                    total -= value * c
            lower = total < best
            winner = tl.where(lower, code, winner)
            best = tl.where(lower, total, best)
        # Where no distance is below infinity every winner still is 0, and so is the answer.
        index = tl.min(tl.where(best == tl.min(best, 0), winner, k - 1), 0)
        tl.store(indices + output, index.to(tl.int64))
        pending = tl.where(pending == output, outputs, pending)
        output = tl.min(pending, 0)


@triton.jit(do_not_specialize=["rows", "d"])
def _square_norms(codes, squares, rows, d, ROWS: tl.constexpr):
    """squares[k] = sum over d of codes[k, d]^2 in float64, in the order of d; launched without contraction to FMA."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float64)
    for j in range(0, d):
        c = tl.load(codes + row.to(tl.int64) * d + j, mask=row < rows, other=0.0)
        total += c * c
    tl.store(squares + row, total, mask=row < rows)


class _Packed(NamedTuple):
    """A codebook as the kernels read it, books = 1 or S; a codeword with a NaN or an infinity is NaN throughout."""

    exact: torch.Tensor  # [books, d, K] float64: codewords, of unit length for cosine
    mu: torch.Tensor  # [books, d] float32: their mean, zero for cosine
    codes: torch.Tensor  # [books, d, K] float32: exact - mu
    half_norms: torch.Tensor  # [books, K] float32: |exact - mu|^2 / 2, zero for cosine
    bounds: torch.Tensor  # [books, 2] float64: the largest half norm and the largest |exact - mu|


def _pack(codebook: torch.Tensor, metric: str) -> _Packed:
    k, d = codebook.shape[-2:]
    codes = codebook.reshape(-1, k, d).double()
    codes = torch.where(codes.isfinite().all(-1, keepdim=True), codes, torch.nan)
    if metric == "cosine":
        squares = codes.new_empty(codes.shape[0], k, 1)
        _square_norms[(triton.cdiv(squares.numel(), _CANDIDATES),)](
            codes.contiguous(), squares, squares.numel(), d, _CANDIDATES, enable_fp_fusion=False
        )
        codes = torch.where(squares == 0, 0.0, codes / squares.sqrt())
    mu = codes.nanmean(1).float() if metric == "l2" else codes.new_zeros(codes.shape[0], d, dtype=torch.float32)
    centred = codes - mu.unsqueeze(1).double()
    squares = centred.square().sum(-1)
    half_norms = squares / 2 if metric == "l2" else squares * 0
    bounds = torch.stack([half_norms, squares.sqrt()], -1)
    bounds = torch.where(bounds.isnan(), 0.0, bounds).amax(1)
    return _Packed(codes.mT.contiguous(), mu, centred.float().mT.contiguous(), half_norms.float(), bounds)


def vq_assign(x: torch.Tensor, codebook: torch.Tensor, metric: str, exact: bool) -> torch.Tensor:
    """x [..., D], codebook [K, d] | [S, K, d] -> indices [..., S] int64; the contract of ``ops/vq_assign/__init__.py``."""
    k, d = codebook.shape[-2:]
    s = x.shape[-1] // d
    indices = torch.empty(*x.shape[:-1], s, dtype=torch.int64, device=x.device)
    if indices.numel() == 0:
        return indices
    if k >= 1 << 31 or d >= 1 << 31:
        raise ValueError(f"vq_assign: codebook {list(codebook.shape)} is too large for the Triton kernel, expected K and d below 2^31")
    # [A, B, D]: a view of dense, channels-first and transposed layouts alike, a copy of what two strides cannot describe.
    rows = x.flatten(1, -2) if x.dim() > 2 else x.reshape(1, -1, x.shape[-1])
    if x.dtype in (torch.bfloat16, torch.float16):
        # A dot of operands widened in the kernel goes to TF32 on sm_100, "ieee" or not (Triton 3.6), and the bound would not hold.
        rows = rows.float()
    packed = _pack(codebook, metric)
    books = packed.mu.shape[0]
    outputs = indices.numel()
    shape: tuple[Any, ...] = (outputs, rows.shape[1], s, books, d, k, *rows.stride())
    l2 = metric == "l2"
    with torch.cuda.device_of(x):
        _search[(triton.cdiv(outputs // books, _ROWS) * books,)](
            rows, packed.mu, packed.codes, packed.half_norms, packed.bounds, indices, *shape, exact, l2, _ROWS, _CODES, _ELEMENTS
        )
        if exact:
            _rescore[(triton.cdiv(outputs, _SCAN),)](
                rows, packed.exact, indices, *shape, l2, _SCAN, _CANDIDATES, num_warps=4, enable_fp_fusion=False
            )
    return indices
