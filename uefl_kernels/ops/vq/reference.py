"""The definition of ``vq``: assign, gather, loss, counts and per-code sums, composed from plain PyTorch.

It is also what runs on a GPU, around the search kernel of that GPU: no step synchronises with the host.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import torch

from ..._gather import flat_indices, gather
from ..._library import triton_available
from ..vq_assign.reference import require_finite, search

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def vq(
    x: torch.Tensor,
    codebook: torch.Tensor,
    metric: str,
    exact: bool,
    with_sums: bool,
    codebook_weight: float,
    commitment_weight: float,
    rotation: bool,
) -> Result:
    """x [..., D], codebook [K, d] | [S, K, d] -> quantized, indices, loss, counts, sums (see ``ops/vq/__init__.py``)."""
    require_finite("vq", codebook)
    return compose(x, codebook, search(x, codebook, metric), with_sums, codebook_weight, commitment_weight)


def compose(
    x: torch.Tensor, codebook: torch.Tensor, indices: torch.Tensor, with_sums: bool, codebook_weight: float, commitment_weight: float
) -> Result:
    """Everything after the search."""
    codes = gather(codebook, indices)
    quantized = codes.to(x.dtype).reshape(x.shape)
    error = (x.double() - codes.double().reshape(x.shape)).square().sum()
    loss = error * ((codebook_weight + commitment_weight) / max(1, x.numel()))
    flat = flat_indices(codebook, indices)
    counts = torch.zeros(codebook.shape[:-1].numel(), dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    sums = code_sums(x, codebook, flat) if with_sums else x.new_empty(0, dtype=torch.float64)
    return quantized, indices, loss.to(loss_dtype(x)), counts.reshape(codebook.shape[:-1]), sums


def code_sums(x: torch.Tensor, codebook: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Sum of the rows of each codeword, float64, in 64-bit fixed point: the order of the rows does not change a bit.

    Every codeword has a unit of its own, 2^-(62 - ceil(log2 N) - e), where 2^e is the power of two above the largest |x| of its
    rows: N rows cannot overflow, at least 31 bits of the largest value remain for any N below 2^31, and a row of 1e16 costs
    the other codewords nothing. A codeword that received NaN or an infinity has sums of NaN.
    """
    d = codebook.shape[-1]
    rows = x.reshape(-1, d).double()
    sums = torch.zeros(codebook.shape[:-1].numel(), d, dtype=torch.int64, device=x.device)
    if rows.numel() == 0:
        return sums.double().reshape(codebook.shape)
    peaks = rows.abs().amax(1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest = peaks.new_zeros(sums.shape[0]).scatter_reduce(0, flat, peaks, "amax")
    finite, shift = fixed_point(largest, rows.shape[0])
    rows = torch.where(finite[flat, None], rows, 0.0)
    sums.index_add_(0, flat, (rows * power_of_two(shift)[flat, None]).round().long())
    return from_fixed_point(sums, finite, shift).reshape(codebook.shape)


def fixed_point(largest: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the largest |x| of each codeword: whether it is finite, and the power of two of the units in 1.0."""
    finite = largest.isfinite()
    exponent = torch.frexp(torch.where(finite, largest, 0.0)).exponent.clamp(min=-900).long()
    return finite, 62 - math.ceil(math.log2(rows)) - exponent


def from_fixed_point(sums: torch.Tensor, finite: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Sums [.., d] in units back to float64."""
    return torch.where(finite[:, None], sums.double() * power_of_two(-shift)[:, None], torch.nan)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float64 by its bits: exact on every device, which pow is not, and no transfer from the host."""
    return (exponent + 1023).bitwise_left_shift(52).view(torch.float64)


def loss_dtype(x: torch.Tensor) -> torch.dtype:
    """float64 in, float64 out; everything else is float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def vq_around(
    assign: Callable[..., torch.Tensor],
    x: torch.Tensor,
    codebook: torch.Tensor,
    metric: str,
    exact: bool,
    with_sums: bool,
    codebook_weight: float,
    commitment_weight: float,
    rotation: bool,
) -> Result:
    """The same around another search kernel; in Triton where that runs, which reads x once or twice instead of a dozen times."""
    indices = assign(x, codebook, metric, exact)
    after = importlib.import_module(f"{__package__}.triton").compose if triton_available() else compose
    result: Result = after(x, codebook, indices, with_sums, codebook_weight, commitment_weight)
    return result
