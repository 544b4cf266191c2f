"""``vq_assign`` in Triton, for the GPUs that ``csrc/cuda`` was not built for.

Under ``TRITON_INTERPRET=1`` it also takes CPU tensors.

Three phases under the certificate of ``csrc/common/certificate.h``, without a wait for the host, and without
scores in memory:

``_search``          every row against every codeword, one float16 product on the tensor cores; best and
                     second best stay in registers. Rows with a gap within the error bound go to a list.
``_search_listed``   the rows of the list again, in three float16 products, which leaves a few in ten thousand
``_rescore``         those few in float64, the way the reference does

Without the certificate only rows that float16 cannot hold go to the list, and from there to the last phase.

Scores are half squared distances less a constant of the row: with y = x - mu, b = c - mu and mu the mean
codeword,
|x - c|^2 / 2 - |y|^2 / 2 = |b|^2 / 2 - y.b, which keeps its digits when the data sit far from the origin.
For cosine mu = 0, c is the unit codeword and the score is -x.c. Rows and codebook are scaled by powers of
two into the range of float16.

A thread holds every eighth column of a tile of scores. It writes the number of the column into the lowest
mantissa bits and keeps the best and the second best of each residue. So the order costs three minima a
score. The columns of a row are in different lanes, and meet once, after the last tile. The tests interpret
and compile these kernels. On an H100 they were right in small cases, and were not timed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import Arguments
from .triton_epilogue import _ELEMENTS, _OPEN_ROWS, Epilogue, _begin, _finish, _finish_open
from .triton_pack import (
    _COUNT,
    _FIELDS,
    _HALF_SQUARE,
    _LAST,
    _PADDING,
    _RADIUS,
    _REST,
    _exponent,
    _field,
    _packed,
    _power,
    _width,
)

# Columns of a row of scores that stay separate until the end: two for each of the four lanes of a row of
# the matrix unit.
_COLUMNS = tl.constexpr(8)
# Rows that one program of the last phase scans for uncertain ones, and codewords that it evaluates at a
# time.
_SCAN, _CANDIDATES = 32, 128
# Run-time values: a new N or K does not recompile. Strides stay special: whether 1, or divisible by 16,
# decides the loads.
_SHAPE = ["outputs", "outer", "segments", "codebooks", "k"]


class TileConfig(NamedTuple):
    """Tiles of a phase.

    ``chunk`` elements are multiplied at a time; it may be the whole width.
    """

    rows: int
    codewords: int
    chunk: int
    warps: int
    stages: int


def config(capability: tuple[int, int], width: int) -> TileConfig:
    """Return tile sizes chosen by registers and shared memory, not tuned on a GPU yet.

    tests/kernels/test_triton.py checks both.
    """
    if capability >= (9, 0):  # 227 KB of shared memory
        if width > 256:
            return TileConfig(128, 128, 64, 8, 3)
        return TileConfig(128, 128, width, 8, 3) if width <= 128 else TileConfig(128, 64, width, 8, 2)
    if width > 256:  # 99 KB on the smaller chips of the generation
        return TileConfig(64, 64, 64, 8, 3)
    return (
        TileConfig(64, 64, width, 4, 3)
        if width <= 64
        else TileConfig(64, 64, width, 4 if width <= 128 else 8, 2)
    )


def config_listed(width: int) -> TileConfig:
    """Return small tiles for the second phase, which has few rows and twice the operands."""
    return TileConfig(64, 64, min(width, 64), 4, 2)


@triton.jit
def _load(x, mu, begin, valid, start, stride_d, D: tl.constexpr, CHUNK: tl.constexpr):
    """Load y = x - mu in float32, elements [start, start + CHUNK) of the rows, and zero beyond them."""
    j = start + tl.arange(0, CHUNK)
    inside = valid[:, None] & (j < D)[None, :]
    value = tl.load(x + begin[:, None] + j[None, :] * stride_d, mask=inside, other=0.0)
    mean = tl.load(mu + j)[None, :]
    y = (
        (value - mean.to(tl.float64)).to(tl.float32)
        if x.dtype.element_ty == tl.float64
        else value.to(tl.float32) - mean
    )
    return tl.where(inside, y, 0.0)


@triton.jit
def _high_and_low(y, up):
    """Return y * up as the sum of two float16, up to 2^-22 of it."""
    scaled = y * up[:, None]
    high = scaled.to(tl.float16)
    return high, (scaled - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _halve(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the two halves of the columns of a tile [ROWS, COLUMNS].

    With eight columns in a half, every lane keeps its own.
    """
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _top_two(packed, ROWS: tl.constexpr, CODES: tl.constexpr):
    """Return the best and the second-best score of every residue of the columns modulo _COLUMNS."""
    left, right = _halve(packed, ROWS, CODES)
    best, second = tl.minimum(left, right), tl.maximum(left, right)
    if CODES >= 4 * _COLUMNS:
        best, second = _merge_halves(best, second, ROWS, CODES // 2)
    if CODES >= 8 * _COLUMNS:
        best, second = _merge_halves(best, second, ROWS, CODES // 4)
    if CODES >= 16 * _COLUMNS:
        best, second = _merge_halves(best, second, ROWS, CODES // 8)
    return best, second


@triton.jit
def _merge_halves(best, second, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    best_left, best_right = _halve(best, ROWS, COLUMNS)
    second_left, second_right = _halve(second, ROWS, COLUMNS)
    second = tl.minimum(tl.minimum(second_left, second_right), tl.maximum(best_left, best_right))
    return tl.minimum(best_left, best_right), second


@triton.jit
def _products(
    x, mu, code, begin, valid, stride_d, up, high, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by a tile of codewords, with two small products more if SPLIT.

    If WHOLE, ``high`` has the rows.
    """
    dot = tl.zeros((ROWS, CODES), tl.float32)
    if SPLIT:  # the small products first
        for start in tl.range(0, WIDTH, CHUNK):
            upper, low = _high_and_low(_load(x, mu, begin, valid, start, stride_d, D, CHUNK), up)
            dot = tl.dot(low, tl.load(code + start), dot)
            dot = tl.dot(upper, tl.load(code + start + WIDTH), dot)
    if WHOLE:
        dot = tl.dot(high, tl.load(code), dot)
    else:
        for start in tl.range(0, WIDTH, CHUNK):
            upper, _ = _high_and_low(_load(x, mu, begin, valid, start, stride_d, D, CHUNK), up)
            dot = tl.dot(upper, tl.load(code + start), dot)
    return dot


@triton.jit
def _error_bound(
    header,
    codebook,
    norm,
    half_square,
    codebook_exponent,
    L2: tl.constexpr,
    SPLIT: tl.constexpr,
    D: tl.constexpr,
):
    """Bound the error of the scores of rows of at most these norms.

    It has fp16_error() and score_error_fp16x3() of csrc/common/certificate.h. Their roundings, in float32
    here, vanish in the factors of 1.01.
    """
    radius, codebook_unit = _field(header, codebook, _RADIUS), _power(codebook_exponent - 14)
    rest, last = (
        _field(header, codebook, _REST) * codebook_unit,
        _field(header, codebook, _LAST) * codebook_unit,
    )
    if SPLIT:
        left_out = 1.02 * 2.0**-22 * radius + 1.01 * last + 1.02 * 2.0**-11 * (rest + last)
    else:
        left_out = 1.01 * 2.0**-11 * radius + 1.01 * rest
    slope = (
        left_out
        + 5.05 * (D + 16) * 2.0**-24 * (radius + rest)
        + (D + 8) * (1.01 * 2.0**-24 * radius + 2.0**-125)
    )
    error = norm * slope + (D + 8) * (1.01 * 2.0**-24 * half_square + 2.0**-125 * (1 + radius))
    if L2:
        error += (D + 8) * 2.0**-53 * norm * norm
    return error


@triton.jit
def _score(
    x, mu, packed_codebook, half_norms, header, codebook, begin, valid, padded_k, stride_d,
    EXACT: tl.constexpr, L2: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the best codeword of each row of a tile, and whether it is certain.

    A certain codeword is the one of the definition.
    """
    WHOLE: tl.constexpr = WIDTH == CHUNK and not SPLIT
    BITS: tl.constexpr = CODES // _COLUMNS - 1
    mu += codebook * WIDTH
    packed_codebook += codebook * padded_k * (2 * WIDTH)
    half_norms += codebook * padded_k
    columns, elements = tl.arange(0, CODES), tl.arange(0, CHUNK)

    # A row is scaled to a length in [2^14, 2^15); one far shorter than the codewords need not be.
    if WHOLE:
        y = _load(x, mu, begin, valid, 0, stride_d, D, CHUNK)
        square = tl.sum(y * y, 1)
    else:
        square = tl.zeros((ROWS,), tl.float32)
        for start in tl.range(0, WIDTH, CHUNK):
            y = _load(x, mu, begin, valid, start, stride_d, D, CHUNK)
            square += tl.sum(y * y, 1)
    codebook_exponent = _exponent(header, codebook)
    norm = tl.maximum(tl.sqrt(1.01 * square + D * 2.0**-125), _power(codebook_exponent - 60))
    exponent = tl.minimum((norm.to(tl.int32, bitcast=True) >> 23) - 127, 60)
    up, down = _power(14 - exponent), _power(exponent + codebook_exponent - 28)
    high = up  # not used unless WHOLE
    if WHOLE:
        high, _ = _high_and_low(y, up)

    best = tl.full((ROWS, _COLUMNS), float("inf"), tl.float32)
    second = tl.full((ROWS, _COLUMNS), float("inf"), tl.float32)
    tile = tl.zeros((ROWS, _COLUMNS), tl.int32)
    for first in tl.range(0, padded_k, CODES):
        code = packed_codebook + (first + columns)[None, :].to(tl.int64) * (2 * WIDTH) + elements[:, None]
        dot = _products(
            x, mu, code, begin, valid, stride_d, up, high, SPLIT, WHOLE, D, WIDTH, ROWS, CODES, CHUNK
        )
        score = tl.load(half_norms + first + columns)[None, :] - dot * down[:, None]
        packed = (score.to(tl.int32, bitcast=True) & ~BITS) | (columns // _COLUMNS)[None, :]
        tile_best, tile_second = _top_two(packed.to(tl.float32, bitcast=True), ROWS, CODES)
        tile = tl.where(tile_best < best, first // CODES, tile)
        if EXACT:
            second = tl.minimum(tl.minimum(second, tile_second), tl.maximum(best, tile_best))
        best = tl.minimum(best, tile_best)

    code = (
        tile * CODES + (best.to(tl.int32, bitcast=True) & BITS) * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    )
    row_best = tl.min(best, 1)
    index = tl.min(tl.where(best == row_best[:, None], code, 0x7FFFFFFF), 1)
    half_square = _field(header, codebook, _HALF_SQUARE)
    certain = norm < tl.where(half_square < 2.0**120, 2.0**60, 0.0)  # of what float16 can hold, scaled
    if EXACT:
        row_second = tl.min(tl.where(code == index[:, None], second, best), 1)
        error = _error_bound(header, codebook, norm, half_square, codebook_exponent, L2, SPLIT, D)
        # The number of the column replaced the lowest bits.
        error += (BITS + 1) * 2.0**-24 * (tl.abs(row_best) + tl.abs(row_second))
        certain = certain & (row_second - row_best > 2.02 * error)
    return index.to(tl.int64), certain


@triton.jit(do_not_specialize=_SHAPE)
def _search(
    x, mu, packed_codebook, half_norms, header, indices, listed,
    outputs: tl.int64, outer: tl.int64, segments: tl.int64, codebooks: tl.int64, k,
    stride_a: tl.int64, stride_b: tl.int64, stride_d: tl.int64,
    opened, errors, counts, codewords, rounded, quantized, sums, scales, largest, middle, weights, mass_scale,
    EXACT: tl.constexpr, L2: tl.constexpr, FLAT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CODES: tl.constexpr, CHUNK: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Write the best codeword to indices[row, segment].

    Outputs that are not certain are listed in their codebook. With ``counts`` run the epilogue of the certain
    rows, and mark the others in ``opened``.
    """
    program = tl.program_id(0).to(tl.int64)
    codebook, rows = program % codebooks, outputs // codebooks
    # Output row * segments + segment: row m of the search in a codebook is every output, or every one of its
    # segment.
    m = (program // codebooks) * ROWS + tl.arange(0, ROWS)
    output, valid = m * codebooks + codebook, m < rows
    if FLAT:  # without a division
        begin = m * stride_b + codebook * D * stride_d
    else:
        begin = _begin(output, codebook, segments, codebooks, outer, stride_a, stride_b, stride_d, False, D)
    padded_k = (k + 127) // 128 * 128
    index, certain = _score(
        x, mu, packed_codebook, half_norms, header, codebook, begin, valid, padded_k, stride_d,
        EXACT, L2, False, D, WIDTH, ROWS, CODES, CHUNK,
    )  # fmt: skip
    index = tl.where(index < k, index, 0)  # beyond: of a row that is not finite
    tl.store(indices + output, index, mask=valid)
    is_open = valid & ~certain
    number = is_open.to(tl.int32)
    total = tl.sum(number, 0)
    base = tl.atomic_add(
        header + codebook * _FIELDS + _COUNT, total.to(tl.int64), mask=total > 0, sem="relaxed"
    )
    tl.store(listed + codebook * rows + base + tl.cumsum(number, 0) - 1, output, mask=is_open)
    if counts is not None:
        tl.store(opened + output, number.to(tl.int8), mask=valid)
        error = _finish(
            x, begin, valid & certain, output, codebook * k + index, stride_d,
            counts, codewords, rounded, quantized, sums, scales, largest, middle, weights, mass_scale,
            D, ROWS, ELEMENTS,
        )  # fmt: skip
        tl.store(errors + program, error)


@triton.jit(do_not_specialize=_SHAPE)
def _search_listed(
    x, mu, packed_codebook, half_norms, header, indices, listed,
    outputs: tl.int64, outer: tl.int64, segments: tl.int64, codebooks: tl.int64, k,
    stride_a: tl.int64, stride_b: tl.int64, stride_d: tl.int64,
    L2: tl.constexpr, FLAT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Search the listed outputs with three products.

    Certain rows leave the list: their place becomes -1.
    """
    codebook = tl.program_id(0).to(tl.int64) % codebooks
    listed += codebook * (outputs // codebooks)
    count = tl.load(header + codebook * _FIELDS + _COUNT)
    padded_k = (k + 127) // 128 * 128
    for tile in tl.range(
        tl.program_id(0).to(tl.int64) // codebooks, tl.cdiv(count, ROWS), tl.num_programs(0) // codebooks
    ):
        place = tile * ROWS + tl.arange(0, ROWS)
        valid = place < count
        output = tl.load(listed + place, mask=valid, other=0)
        begin = _begin(output, codebook, segments, codebooks, outer, stride_a, stride_b, stride_d, FLAT, D)
        index, certain = _score(
            x, mu, packed_codebook, half_norms, header, codebook, begin, valid, padded_k, stride_d,
            True, L2, True, D, WIDTH, ROWS, CODES, CHUNK,
        )  # fmt: skip
        tl.store(indices + output, index, mask=valid & certain)
        tl.store(listed + place, tl.full((ROWS,), -1, tl.int64), mask=valid & certain)


@triton.jit(do_not_specialize=_SHAPE)
def _rescore(
    x, exact, header, indices, listed,
    outputs: tl.int64, outer: tl.int64, segments: tl.int64, codebooks: tl.int64, k,
    stride_a: tl.int64, stride_b: tl.int64, stride_d: tl.int64,
    L2: tl.constexpr, FLAT: tl.constexpr, D: tl.constexpr, SCAN: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Find the exact answer for the rows on the list.

    Launched without contraction to FMA, which would round differently.
    """
    codebook = tl.program_id(0).to(tl.int64) % codebooks
    listed += codebook * (outputs // codebooks)
    count = tl.load(header + codebook * _FIELDS + _COUNT)
    for block in tl.range(
        tl.program_id(0).to(tl.int64) // codebooks, tl.cdiv(count, SCAN), tl.num_programs(0) // codebooks
    ):
        place = block * SCAN + tl.arange(0, SCAN)
        pending = tl.load(listed + place, mask=place < count, other=-1)
        output = tl.max(pending, 0)
        while output >= 0:
            offset = _begin(
                output, codebook, segments, codebooks, outer, stride_a, stride_b, stride_d, FLAT, D
            )
            best = tl.full((CODES,), float("inf"), tl.float64)
            winner = tl.zeros((CODES,), tl.int32)
            for first in range(0, k, CODES):
                code = first + tl.arange(0, CODES)
                total = tl.zeros((CODES,), tl.float64)
                for j in range(0, D):
                    value = tl.load(x + offset + j * stride_d).to(tl.float64)
                    c = tl.load(exact + (codebook * D + j) * k + code, mask=code < k, other=float("nan"))
                    if L2:
                        total += (value - c) * (value - c)
                    else:
                        total -= value * c
                lower = total < best  # NaN never is
                winner = tl.where(lower, code, winner)
                best = tl.where(lower, total, best)
            # If no distance is below infinity, every winner is still 0, which is the answer.
            index = tl.min(tl.where(best == tl.min(best, 0), winner, k - 1), 0)
            tl.store(indices + output, index.to(tl.int64))
            pending = tl.where(pending == output, -1, pending)
            output = tl.max(pending, 0)


@cache
def _device(index: int | None) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors of a GPU, or (8, 0) and 1 for the interpreter."""
    if index is None:
        return (8, 0), 1
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), int(properties.multi_processor_count)


def _rows(x: torch.Tensor, codebook: torch.Tensor) -> tuple[torch.Tensor, bool, tuple[int, ...]]:
    """Return x as [1, outputs / codebooks, codebooks * d] and True if a view can have that shape.

    Else return it as [A, B, D], copied if two strides cannot describe it.

    And its strides, 0 for a first dimension that is made here: it would be N * D, and another kernel where
    that is divisible by 16.
    """
    width = codebook.shape[-1] if codebook.dim() == 2 else x.shape[-1]
    try:
        rows, flat = x.view(1, -1, width), True
    except RuntimeError:
        rows, flat = x.flatten(1, -2) if x.dim() > 2 else x.reshape(1, -1, x.shape[-1]), False
    return rows, flat, (0 if flat or x.dim() <= 2 else rows.stride(0), *rows.stride()[1:])


def vq_assign(given: Arguments) -> torch.Tensor:
    """Return indices ``[..., S]``."""
    return assign(*given, Epilogue())[0]


def _check_size(codebook: torch.Tensor) -> None:
    k, d = codebook.shape[-2:]
    if k >= (1 << 31) - _PADDING or d > 1 << 16:
        raise ValueError(
            f"vq_assign: codebook {list(codebook.shape)} is too large for Triton, expected K < 2^31 - 128 and"
            " d <= 2^16"
        )


def assign(
    x: torch.Tensor, codebook: torch.Tensor, metric: str, exact: bool, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices, and the results that ``epilogue`` asks for.

    With ``quantized``, these include parts of the sum of (x - codeword)^2.
    """
    k, d = codebook.shape[-2:]
    s = x.shape[-1] // d
    indices = torch.empty(*x.shape[:-1], s, dtype=torch.int64, device=x.device)
    outputs = indices.numel()
    if outputs == 0:
        return indices, x.new_zeros(0, dtype=torch.float64)
    _check_size(codebook)
    rows, flat, strides = _rows(x, codebook)
    l2, width = metric == "l2", _width(d)
    capability, processors = _device(x.device.index)
    first, second = config(capability, width), config_listed(width)
    with torch.cuda.device_of(x):
        packed = _packed(codebook, l2)
        codebooks = packed.mu.shape[0]
        listed = torch.empty(outputs, dtype=torch.int64, device=x.device)
        shape: tuple[Any, ...] = (outputs, rows.shape[1], s, codebooks, k, *strides)
        arrays = (rows, packed.mu, packed.codebook, packed.half_norms, packed.header, indices, listed)
        programs, wanted = (
            triton.cdiv(outputs // codebooks, first.rows) * codebooks,
            epilogue.counts is not None,
        )
        later = triton.cdiv(outputs, _OPEN_ROWS) if wanted else 0
        errors = torch.zeros(programs + later if wanted else 0, dtype=torch.float64, device=x.device)
        opened = torch.empty(outputs if later else 0, dtype=torch.int8, device=x.device)
        elements = min(_ELEMENTS, 1 << (d - 1).bit_length())
        follow = (opened, errors, *epilogue) if wanted else (None, None, *epilogue)
        _search[(programs,)](
            *arrays, *shape, *follow, exact, l2, flat, d, width, *first[:3], elements,
            num_warps=first.warps, num_stages=first.stages,
        )  # fmt: skip
        blocks = (
            min(triton.cdiv(outputs // codebooks, _SCAN), triton.cdiv(8 * processors, codebooks)) * codebooks
        )
        if exact:
            _search_listed[(blocks,)](
                *arrays, *shape, l2, flat, d, width, *second[:3],
                num_warps=second.warps, num_stages=second.stages,
            )  # fmt: skip
        _rescore[(blocks,)](
            rows, packed.exact, packed.header, indices, listed, *shape, l2, flat, d, _SCAN, _CANDIDATES,
            enable_fp_fusion=False,
        )  # fmt: skip
        if later:
            _finish_open[(later,)](
                rows, indices, opened, errors, *epilogue, *shape, programs, flat, d, _OPEN_ROWS, elements
            )
    return indices, errors
