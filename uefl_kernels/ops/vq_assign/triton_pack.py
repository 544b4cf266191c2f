"""The operands of the Triton phases of ``vq_assign``.

The codebook is centered, scaled into the range of float16, and measured for the certificate. This takes two
launches, and the host does not wait: ``_center`` finds the mean codeword and the largest element, and
``_pack`` writes both float16 parts of the codewords.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# The score of padding. Every finite score that passes the certificate is lower.
_NEVER = tl.constexpr(2.0**127)
# Fields of the header of a codebook, 64 bits each. The first field is the number of rows on the list. The
# others are bits of doubles, maxima over the codewords b = c - mu: an element of |b|, |b|^2 / 2, |b|, the
# length of b less its first float16 part, and less both parts. The last two are in units of the packed
# codebook.
_COUNT, _PEAK, _HALF_SQUARE, _RADIUS, _REST, _LAST = (tl.constexpr(i) for i in range(6))
_FIELDS = tl.constexpr(6)
# K is padded to a multiple of this number, so that tiles of 64 and 128 codewords fit.
_PADDING = 128


@triton.jit
def _power(exponent):
    """Return 2^exponent in float32, exponent in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _field(header, codebook, FIELD: tl.constexpr):
    """Return a double of the header in float32, rounded up."""
    return (tl.load(header + codebook * _FIELDS + FIELD).to(tl.float64, bitcast=True) * (1 + 2.0**-20)).to(
        tl.float32
    )


@triton.jit
def _raise(header, codebook, FIELD: tl.constexpr, value):
    """Raise a field to a non-negative double, because the bits of such doubles have the same order."""
    tl.atomic_max(header + codebook * _FIELDS + FIELD, value.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _exponent(header, codebook):
    """Return e with |c - mu| < 2^(e + 1) for every element of the codebook."""
    return tl.minimum(
        tl.maximum(((tl.load(header + codebook * _FIELDS + _PEAK) >> 52) - 1023).to(tl.int32), -35), 60
    )


@triton.jit(do_not_specialize=["k"])
def _center(
    codewords,
    mu,
    header,
    k,
    L2: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Compute mu, the mean of finite codewords (0 for cosine), and the largest |c - mu|."""
    program = tl.program_id(0).to(tl.int64)
    codebook, j = (
        program // (WIDTH // ELEMENTS),
        program % (WIDTH // ELEMENTS) * ELEMENTS + tl.arange(0, ELEMENTS),
    )
    total, number = tl.zeros((ELEMENTS,), tl.float64), tl.zeros((ELEMENTS,), tl.int32)
    low, high = (
        tl.full((ELEMENTS,), float("inf"), tl.float64),
        tl.full((ELEMENTS,), float("-inf"), tl.float64),
    )
    for first in range(0, k, CODES):
        code = first + tl.arange(0, CODES)
        inside = (code < k)[:, None] & (j < D)[None, :]
        c = tl.load(
            codewords + (codebook * k + code.to(tl.int64)[:, None]) * D + j[None, :], mask=inside, other=0.0
        ).to(tl.float64)
        finite = inside & (tl.abs(c) < float("inf"))
        total += tl.sum(tl.where(finite, c, 0.0), 0)
        number += tl.sum(finite.to(tl.int32), 0)
        low = tl.minimum(low, tl.min(tl.where(finite, c, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(finite, c, float("-inf")), 0))
    mean = tl.where(number > 0, total / tl.maximum(number, 1).to(tl.float64), 0.0).to(tl.float32)
    if not L2:
        mean = tl.zeros((ELEMENTS,), tl.float32)
    tl.store(mu + codebook * WIDTH + j, mean)
    peak = tl.maximum(high - mean.to(tl.float64), mean.to(tl.float64) - low)
    peak = (
        tl.max(tl.where(number > 0, tl.minimum(peak, 1.7e308), 0.0), 0)
        if L2
        else tl.full((), 1.0, tl.float64)
    )
    _raise(header, codebook, _PEAK, peak)


@triton.jit(do_not_specialize=["k"])
def _pack(
    codewords,
    mu,
    header,
    exact,
    packed_codebook,
    half_norms,
    k,
    L2: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Pack the codebook as the phases read it (see _Packed).

    Launch it without contraction to FMA, so that norms match the definition.
    """
    padded_k = (k + 127) // 128 * 128
    program = tl.program_id(0).to(tl.int64)
    programs = padded_k // CODES  # of a codebook
    codebook, code = program // programs, program % programs * CODES + tl.arange(0, CODES)
    source = codewords + (codebook * k + code) * D
    finite, square = code < k, tl.zeros((CODES,), tl.float64)
    for element in range(0, D):  # one after the other: the order of the definition
        c = tl.load(source + element, mask=code < k, other=0.0).to(tl.float64)
        finite = finite & (tl.abs(c) < float("inf"))
        square += c * c
    norm = tl.where(square == 0, 1.0, tl.sqrt(square))

    up = _power(14 - _exponent(header, codebook)).to(tl.float64)
    square, rest, last = (
        tl.zeros((CODES,), tl.float64),
        tl.zeros((CODES,), tl.float64),
        tl.zeros((CODES,), tl.float64),
    )
    for start in range(0, WIDTH, ELEMENTS):
        j = start + tl.arange(0, ELEMENTS)
        inside = finite[:, None] & (j < D)[None, :]
        c = tl.load(source[:, None] + j[None, :], mask=inside, other=0.0).to(tl.float64)
        if not L2:
            c = c / norm[:, None]
        place = exact + (codebook * D + j[None, :]) * k + code[:, None]
        tl.store(
            place, tl.where(finite[:, None], c, float("nan")), mask=(code < k)[:, None] & (j < D)[None, :]
        )
        b = tl.where(inside, c - tl.load(mu + codebook * WIDTH + j)[None, :].to(tl.float64), 0.0)
        scaled = b * up
        high = scaled.to(tl.float32).to(tl.float16)
        left = scaled - high.to(tl.float64)
        low = left.to(tl.float32).to(tl.float16)
        left_last = left - low.to(tl.float64)
        place = packed_codebook + (codebook * padded_k + code[:, None]) * (2 * WIDTH) + j[None, :]
        tl.store(place, high)
        tl.store(place + WIDTH, low)
        square += tl.sum(b * b, 1)
        rest += tl.sum(left * left, 1)
        last += tl.sum(left_last * left_last, 1)
    half_norm = square / 2 if L2 else square * 0
    tl.store(half_norms + codebook * padded_k + code, tl.where(finite, half_norm.to(tl.float32), _NEVER))
    _raise(header, codebook, _HALF_SQUARE, tl.max(half_norm, 0))
    _raise(header, codebook, _RADIUS, tl.sqrt(tl.max(square, 0)))
    _raise(header, codebook, _REST, tl.sqrt(tl.max(rest, 0)))
    _raise(header, codebook, _LAST, tl.sqrt(tl.max(last, 0)))


class _Packed(NamedTuple):
    """A codebook as the phases read it, codebooks = 1 or S.

    K is padded to a multiple of 128, and d to the width.
    """

    header: torch.Tensor  # [codebooks, fields] int64
    mu: torch.Tensor  # [codebooks, width] float32
    # [codebooks, padded K, 2, width] float16: both parts of b; zero where there is no finite codeword
    codebook: torch.Tensor
    half_norms: torch.Tensor  # [codebooks, padded K] float32: |b|^2 / 2, zero for cosine
    # [codebooks, d, K] float64: codewords, of unit length for cosine; NaN throughout where one is not finite
    exact: torch.Tensor


def _width(d: int) -> int:
    """Return the elements of a packed codeword: a power of two that suits the matrix units."""
    return max(16, 1 << (d - 1).bit_length()) if d <= 512 else (d + 63) // 64 * 64


def _packed(codebook: torch.Tensor, l2: bool) -> _Packed:
    k, d = codebook.shape[-2:]
    codebooks, padded_k, width = codebook.numel() // (k * d), triton.cdiv(k, _PADDING) * _PADDING, _width(d)
    packed = _Packed(
        torch.zeros(codebooks, _FIELDS.value, dtype=torch.int64, device=codebook.device),
        torch.empty(codebooks, width, dtype=torch.float32, device=codebook.device),
        torch.empty(codebooks, padded_k, 2, width, dtype=torch.float16, device=codebook.device),
        torch.empty(codebooks, padded_k, dtype=torch.float32, device=codebook.device),
        torch.empty(codebooks, d, k, dtype=torch.float64, device=codebook.device),
    )
    codebook = codebook.contiguous()
    _center[(codebooks * width // 16,)](codebook, packed.mu, packed.header, k, l2, d, width, 128, 16)
    _pack[(codebooks * padded_k // 16,)](
        codebook,
        packed.mu,
        packed.header,
        packed.exact,
        packed.codebook,
        packed.half_norms,
        k,
        l2,
        d,
        width,
        16,
        16,
        enable_fp_fusion=False,
    )
    return packed
