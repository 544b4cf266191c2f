"""``vq`` around a ``vq_forward``: of the same backend on a GPU and in Triton, and in plain PyTorch elsewhere.

It turns the error into a loss and whole numbers into sums. No step synchronizes with the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..._dtypes import result_dtype
from ..._library import triton_available
from ..vq_assign.distances import require_valid
from .forward import composed as forward

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_ROOM = 3  # powers of two between a codeword and the largest row that its unit is made for
_BITS = 31  # that remain of the largest value of a codeword's rows, for any N below 2^31


class Arguments(NamedTuple):
    """Arguments of the op."""

    x: torch.Tensor
    """``[..., D]``"""
    codebook: torch.Tensor
    """``[K, d]`` or ``[S, K, d]``"""
    metric: str
    exact: bool
    with_sums: bool
    codebook_weight: float
    commitment_weight: float
    rotation: bool


def fallback(given: Arguments) -> Result:
    """Compute ``vq`` where no kernel runs."""
    require_valid("vq", given.codebook)
    return compose(lambda *args: forward.fallback(forward.Arguments(*args)), forward.add, given)


def around(vq_forward: Callable[..., forward.Result], given: Arguments) -> Result:
    """Compute ``vq`` around the ``vq_forward`` of a backend."""
    add = importlib.import_module(".forward.triton", __package__).add if triton_available() else forward.add
    return compose(vq_forward, add, given)


def compose(vq_forward: Callable[..., forward.Result], add: Callable[..., None], given: Arguments) -> Result:
    """Compute ``vq`` of a ``vq_forward``, and of an ``add`` for the rows that are counted again."""
    x, codebook = given.x, given.codebook
    rows = x.numel() // codebook.shape[-1]
    expected = expected_shift(codebook, rows) if given.with_sums else None
    scales = None if expected is None else power_of_two(expected)
    rows_given = forward.Arguments(x, codebook, scales, given.metric, given.exact)
    quantized, indices, error, counts, largest, fixed = vq_forward(*rows_given)
    loss = error * ((given.codebook_weight + given.commitment_weight) / max(1, x.numel()))
    sums = error.new_empty(0)
    if expected is not None:
        finite, shift = fixed_point(largest.view(torch.float64), expected, rows)
        again = finite & (shift != expected)
        fixed = torch.where(again[:, None], 0, fixed)
        add(x, codebook, indices, torch.where(again, power_of_two(shift), 0.0), fixed)
        sums = torch.where(
            finite[:, None], fixed.double() * power_of_two(-shift)[:, None], torch.nan
        ).reshape(codebook.shape)
    return quantized, indices, loss.to(result_dtype(x)), counts.reshape(codebook.shape[:-1]), sums


def expected_shift(codebook: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the expected units of the sums of each codeword.

    They are the exponent of 1.0 in these units, [C] int64 with C = K or S * K.

    Sums are in 64-bit fixed point, so that the order of the rows does not change a bit. Every codeword has a
    unit of its own, 2^-(62 - ceil(log2 N) - e), where 2^e is above the largest |x| of its rows: N rows cannot
    overflow, at least 31 bits of the largest value remain for any N below 2^31, and a row of 1e16 costs the
    other codewords nothing. A codeword that received NaN or an infinity has sums of NaN.

    To read the rows only once, e must be known before them. It is taken from the codeword, 2^e = 8 times the
    power of two above its largest element, and kept where it serves: where no row reaches 2^e, and 31 bits
    remain. Otherwise e comes from the rows, which are counted again.
    """
    reach = codebook.detach().flatten(0, -2).abs().amax(1).double().nan_to_num(nan=0.0, posinf=0.0)
    return _digits(rows) - _exponent(reach) - _ROOM


def fixed_point(
    largest: torch.Tensor, expected: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether the largest |x| of each codeword is finite, and the exponent of 1.0 in its units."""
    finite = largest.isfinite()
    needed = _digits(rows) - _exponent(torch.where(finite, largest, 0.0))
    spare = needed - expected
    return finite, torch.where((spare >= 0) & (spare <= _digits(rows) - _BITS), expected, needed)


def _digits(rows: int) -> int:
    """Return the number of bits of each row that add up within 2^62."""
    bits = 0
    while 1 << bits < rows:  # bit_length would fix the number of rows in a graph
        bits += 1
    return 62 - bits


def _exponent(value: torch.Tensor) -> torch.Tensor:
    """Return the least e >= -900 with value < 2^e, for finite float64 from 0 on, and 0 for 0.

    It reads the bits: inductor's frexp does not compile. torch.jit.trace does not take bits.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        return torch.frexp(value).exponent.long().clamp(min=-900).masked_fill(value == 0, 0)
    return ((value.view(torch.int64) >> 52) - 1022).clamp(min=-900).masked_fill(value == 0, 0)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent in float64 from its bits.

    This is exact on every device, unlike pow, and needs no transfer from the host.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        return torch.ldexp(exponent.new_ones((), dtype=torch.float64), exponent.double())
    return (exponent + 1023).bitwise_left_shift(52).view(torch.float64)
