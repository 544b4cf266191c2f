"""``fsq`` by operations of torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from ..._dtypes import vector_of


class Form(NamedTuple):
    """The numbers of levels of a vector, and the bound of its elements."""

    levels: tuple[int, ...]
    symmetric: bool
    clamp: bool
    eps: float = 1e-3
    """part of the range that the bound has beyond the outermost levels"""

    @property
    def index_dtype(self) -> torch.dtype:
        """Return the dtype of indices: int32 if it holds all of them."""
        return torch.int32 if math.prod(self.levels) <= 2**31 else torch.int64

    def factors(self) -> list[int]:
        """Return the factor of each level in an index."""
        return [math.prod(self.levels[:place]) for place in range(len(self.levels))]

    def half(self) -> list[float]:
        """Return half of the range of each bounded element."""
        return [(count - 1) * (1 + self.eps) / 2 for count in self.levels]

    def shift(self) -> list[float]:
        """Return the number that is added to each element before the bound."""
        if self.symmetric:
            return [0.0] * len(self.levels)
        return [
            self._inverse((1 - count % 2) / 2 / half)
            for count, half in zip(self.levels, self.half(), strict=True)
        ]

    def slope(self) -> list[float]:
        """Return the factor between the gradients of a bounded and of a quantized element."""
        if self.symmetric:
            return [1.0] * len(self.levels)
        return [half / (count // 2) for count, half in zip(self.levels, self.half(), strict=True)]

    def thresholds(self) -> list[list[float]]:
        """Return the least z of each level after the first, for each element."""
        found = []
        for count, half, shift in zip(self.levels, self.half(), self.shift(), strict=True):
            offset = (1 - count % 2) / 2
            ends = (
                (2 * level - count) / (count - 1)
                if self.symmetric
                else (level - count // 2 - 0.5 + offset) / half
                for level in range(1, count)
            )
            found.append([self._inverse(end) - shift for end in ends])
        return found

    def _inverse(self, bounded: float) -> float:
        return bounded if self.clamp else math.atanh(bounded)


class Arguments(NamedTuple):
    """Arguments of ``fsq``."""

    z: torch.Tensor
    """``[..., d]``"""
    levels: Sequence[int]
    symmetric: bool
    clamp: bool
    indexed: bool

    @property
    def form(self) -> Form:
        """Return the levels and the bound."""
        return Form(tuple(self.levels), self.symmetric, self.clamp)


class FsqGradient(NamedTuple):
    """Arguments of ``fsq_backward``."""

    grad: torch.Tensor
    """``[..., d]``, with respect to quantized"""
    z: torch.Tensor
    """``[..., d]``"""
    levels: Sequence[int]
    symmetric: bool
    clamp: bool

    @property
    def form(self) -> Form:
        """Return the levels and the bound."""
        return Form(tuple(self.levels), self.symmetric, self.clamp)


def forward_mode(z: torch.Tensor) -> bool:
    """Return True if z has a tangent or is transformed by ``torch.func``, which need the formula."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return torch._C._functorch.is_gradtrackingtensor(z)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(z).tangent is not None


class Tables(NamedTuple):
    """The numbers of a form as tensors of a dtype on a device."""

    thresholds: torch.Tensor
    """``[d, max(levels) - 1]``, infinity where an element has fewer levels. In float32 they are rounded up:
    then a float32 reaches both a threshold and the rounded one, or none."""
    values: torch.Tensor
    """``[d, max(levels)]``, the quantized element of each level"""
    levels: torch.Tensor
    """``[d]`` int64"""
    factors: torch.Tensor
    """``[d]`` int64, of each level in an index"""
    shift: torch.Tensor
    """``[d]``, added before the bound"""
    slope: torch.Tensor
    """``[d]``, between the gradients of a bounded and of a quantized element"""


@functools.cache
def tables(form: Form, dtype: torch.dtype, device: torch.device) -> Tables:
    """Return the tables, which are copied to a device once."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        most = max(form.levels)
        rows = [row + [math.inf] * (most - 1 - len(row)) for row in form.thresholds()]
        exact = torch.tensor(rows, dtype=torch.float64)
        rounded = exact.to(dtype)
        up = rounded.nextafter(torch.tensor(math.inf, dtype=dtype))
        level = torch.arange(most).unsqueeze(-1).expand(most, len(form.levels))
        found = Tables(
            torch.where(rounded.double() < exact, up, rounded),
            value(level, form, dtype).t().contiguous(),
            torch.tensor(form.levels),
            torch.tensor(form.factors()),
            torch.tensor(form.shift(), dtype=dtype),
            torch.tensor(form.slope(), dtype=dtype),
        )
        return Tables(*(tensor.to(device) for tensor in found))


def fsq(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the results of the op by a search among the thresholds."""
    z, form = given.z, given.form
    rows = z.reshape(-1, z.shape[-1]).t().contiguous()
    table = tables(form, z.dtype, z.device)
    reached = torch.searchsorted(table.thresholds, rows, right=True)
    level = reached.minimum(table.levels.unsqueeze(-1) - 1).masked_fill(rows.isnan(), 0)
    quantized = torch.where(rows.isnan(), rows, table.values.gather(1, level))
    return quantized.t().reshape(z.shape), index(level.t().reshape(z.shape), form, given.indexed)


def value(level: torch.Tensor, form: Form, dtype: torch.dtype) -> torch.Tensor:
    """Return the quantized element of each level."""
    levels = vector_of(form.levels, dtype, level.device)
    if form.symmetric:
        return 2.0 / (levels - 1) * level.to(dtype) - 1.0
    half = levels // 2
    return (level.to(dtype) - half) / half


def index(level: torch.Tensor, form: Form, indexed: bool) -> torch.Tensor:
    """Return the index of levels ``[..., d]``."""
    if not indexed:
        return level.new_empty(0, dtype=form.index_dtype)
    factors = vector_of(form.factors(), torch.int64, level.device)
    return (level * factors).sum(-1).to(form.index_dtype)


def formula(z: torch.Tensor, form: Form, indexed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the results without the op, for ONNX and for forward-mode differentiation.

    A bounded element can be rounded to the next level where z is as close to a threshold as floats are.
    """
    levels = vector_of(form.levels, z.dtype, z.device)
    shifted = z + vector_of(form.shift(), z.dtype, z.device)
    bounded = shifted.clamp(-1, 1) if form.clamp else shifted.tanh()
    if form.symmetric:
        level = ((levels - 1) * (bounded.detach() + 1) / 2.0 + 0.5).floor()
    else:
        offset = (1 - levels % 2) / 2
        level = (bounded.detach() * vector_of(form.half(), z.dtype, z.device) - offset).round() + levels // 2
    level = level.clamp(min=0).minimum(levels - 1)
    straight = bounded * vector_of(form.slope(), z.dtype, z.device)
    quantized = value(level, form, z.dtype).detach() + (straight - straight.detach())
    return quantized, index(level.nan_to_num(nan=0).long(), form, indexed)


def fsq_backward(given: FsqGradient) -> torch.Tensor:
    """Compute the gradient with respect to z."""
    grad, z, form = given.grad, given.z, given.form
    table = tables(form, z.dtype, z.device)
    shifted = z + table.shift
    if form.clamp:
        return grad * table.slope * (shifted.abs() <= 1)
    bounded = shifted.tanh()
    return grad * table.slope * (1 - bounded * bounded)
