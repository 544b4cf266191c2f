"""``kmeans_step`` and its units in plain PyTorch, in an order that gives the same bits on every backend.

* **Labels** are the argmin of the float64 distance (``vq_assign``).
* **Sums over rows** are sums of 64-bit integers. Every column has a unit of its own, much smaller than the
  precision of the data.
* **Inertia** is a sum of float64 squared distances. Each distance is added in eight partial sums
  (``square_norms``), and the distances are added pairwise in a fixed tree (``tree_sum``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..vq.composed import power_of_two
from ..vq_assign.distances import LARGEST
from ..vq_assign.fallback import search

Units = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_HEAVIEST = 2.0**1000  # the largest valid weight
_LANES = 8  # partial sums of a squared distance
_BLOCK_ELEMENTS = 1 << 22  # elements of a float64 copy of rows


class Arguments(NamedTuple):
    """Arguments of ``kmeans_step``."""

    x: torch.Tensor
    """``[N, d]``"""
    centers: torch.Tensor
    """``[k, d]``"""
    weights: torch.Tensor | None
    """``[N]`` float64, at most 1"""
    middle: torch.Tensor
    """``[d]``; this and the next two arguments are as in :class:`KMeansUnits`"""
    scale: torch.Tensor
    """``[d]``"""
    mass_scale: torch.Tensor
    """scalar"""
    with_inertia: bool


class UnitsArguments(NamedTuple):
    """Arguments of ``kmeans_units``."""

    x: torch.Tensor
    """``[N, d]``"""
    weights: torch.Tensor | None
    """``[N]`` float64"""


def kmeans_units(given: UnitsArguments) -> Units:
    """Check rows, on the CPU only, and compute their units."""
    if given.x.device.type == "cpu":
        require_valid("kmeans_step", given.x, given.weights)
    return units(*given)


def units(x: torch.Tensor, weights: torch.Tensor | None) -> Units:
    """Return middle [d], scale [d], mass_scale [] and weight_unit [] of rows [N, d] and their weights.

    All are float64.

    The middle of a column is the mean of its smallest and its largest element. Weights are first divided by
    weight_unit, a power of two, so that they are at most 1. A row then adds round((x - middle) * weight *
    scale) to the sum of its cluster, and round(weight * mass_scale) to the mass. The sums of N rows cannot
    overflow: they stay within 2^62.
    """
    n, d = x.shape
    if n == 0:
        middle, one = x.new_zeros(d, dtype=torch.float64), x.new_ones((), dtype=torch.float64)
        return middle, torch.ones_like(middle), one * 2.0 ** mass_bits(n), one
    return units_within(n, x.amin(0).double(), x.amax(0).double(), None if weights is None else weights.max())


def units_within(n: int, low: torch.Tensor, high: torch.Tensor, heaviest: torch.Tensor | None) -> Units:
    """Return the units of n rows from the extremes of their columns, [d] float64, and the greatest weight."""
    one = low.new_ones(())
    middle = low / 2 + high / 2
    scale = power_of_two(mass_bits(n) - exponent(torch.maximum(high - middle, middle - low)))
    return middle, scale, one * 2.0 ** mass_bits(n), one if heaviest is None else least_power_of_two(heaviest)


def fallback(given: Arguments) -> Result:
    """Compute ``kmeans_step`` if there is no kernel."""
    require_valid_step(given)
    return after(given, search(given.x, given.centers, "l2")[:, 0])


def after(given: Arguments, labels: torch.Tensor) -> Result:
    """Compute ``kmeans_step`` from the labels that a search has found."""
    x, centers, weights, middle, scale, mass_scale, with_inertia = given
    sums = torch.zeros(centers.shape, dtype=torch.int64, device=x.device)
    for block in blocks(x):
        mass = None if weights is None else weights[block]
        sums.index_add_(0, labels[block], terms(x[block], mass, middle, scale))
    masses = torch.zeros_like(sums[:, 0]).index_add_(0, labels, row_masses(x, weights, mass_scale))
    inertia = x.new_zeros((), dtype=torch.float64)
    if with_inertia:
        squares = distances(x, centers, labels)
        inertia = tree_sum(squares if weights is None else weights * squares)
    return labels.contiguous(), sums, masses, inertia


def terms(
    rows: torch.Tensor, weights: torch.Tensor | None, middle: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the terms of rows in the sum of their cluster, [n, d] int64."""
    centered = rows.double() - middle
    return ((centered if weights is None else centered * weights[:, None]) * scale).round().long()


def row_masses(x: torch.Tensor, weights: torch.Tensor | None, mass_scale: torch.Tensor) -> torch.Tensor:
    """Return the terms of rows in the mass of their cluster, [n] int64."""
    ones = x.new_ones(len(x), dtype=torch.float64) if weights is None else weights
    return (ones * mass_scale).round().long()


def distances(x: torch.Tensor, centers: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of each row to its center, [n] float64."""
    squares = [square_norms(x[block].double() - centers[labels[block]].double()) for block in blocks(x)]
    return torch.cat([x.new_empty(0, dtype=torch.float64), *squares])


def blocks(x: torch.Tensor) -> list[slice]:
    """Cut rows into blocks with small float64 copies."""
    n, d = x.shape
    step = max(1, _BLOCK_ELEMENTS // max(1, d))
    return [slice(start, min(n, start + step)) for start in range(0, n, step)]


def square_norms(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row [n, d], float64.

    Partial sum i of eight adds the elements i, i + 8, i + 16 and so on, in this order.
    """
    n, d = rows.shape
    if rows.device.type == "cpu":  # where a cumulative sum adds in order
        lines = -(-d // _LANES)
        squares = torch.nn.functional.pad(rows * rows, (0, lines * _LANES - d)).reshape(n, lines, _LANES)
        total = squares.cumsum(1)[:, -1] if lines > 0 else rows.new_zeros(n, _LANES)
    else:
        total = rows.new_zeros(n, _LANES)
        for start in range(0, d, _LANES):
            lanes = rows[:, start : start + _LANES]
            total[:, : lanes.shape[1]] += lanes * lanes
    total = total[:, :4] + total[:, 4:]
    total = total[:, :2] + total[:, 2:]
    return total[:, 0] + total[:, 1]


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of values [n].

    Pads to a power of two. Adds the second half to the first until one value is left.
    """
    size = 1 << ceil_log2(len(values))
    values = torch.cat([values, values.new_zeros(size - len(values))])
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return values.sum()


def exponent(values: torch.Tensor) -> torch.Tensor:
    """Return the least e >= -900 with values < 2^e."""
    return torch.frexp(values).exponent.clamp(min=-900).long()


def least_power_of_two(value: torch.Tensor) -> torch.Tensor:
    """Return the least power of two that is not below a value, 2^-900 at least."""
    mantissa, power = torch.frexp(value)
    return power_of_two((power - (mantissa == 0.5).int()).clamp(min=-900).long())


def mass_bits(n: int) -> int:
    """Return how many bits each of n integers may have so that their sum is at most 2^62."""
    return 62 - ceil_log2(n)


def ceil_log2(n: int) -> int:
    """Return the least e with n <= 2^e, or 0 for n = 0."""
    return max(0, n - 1).bit_length()


def largest(values: torch.Tensor) -> float:
    """Return the largest magnitude, in one pass without a copy: NaN if a value is NaN, 0 without values."""
    if values.numel() == 0:
        return 0.0
    low, high = values.aminmax()
    return float(torch.maximum(-low, high))


def require_valid(op: str, x: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Raise RuntimeError for values that cannot be clustered.

    Call it for tensors on the CPU only: on a GPU the check would wait for the device.
    """
    most = largest(x)
    if not math.isfinite(most):
        raise RuntimeError(f"{op}: x holds NaN or infinity; remove or replace those rows")
    if most > LARGEST:
        raise RuntimeError(
            f"{op}: x holds values beyond 2^480 (3e144), and their squares overflow; scale x down"
        )
    if weights is not None and not bool(
        (weights >= 0).all() and (weights <= _HEAVIEST).all() and ((weights > 0).any() or len(x) == 0)
    ):
        raise RuntimeError(f"{op}: weights must be finite (at most 2^1000), not negative and not all zero")


def require_valid_step(given: Arguments) -> None:
    """Raise RuntimeError for arguments of a step that are not valid, on the CPU only."""
    x, centers, weights, _, _, mass_scale, _ = given
    if centers.device.type != "cpu":
        return
    require_valid_centers("kmeans_step", "centers", centers)
    if len(x) > 0 and float(mass_scale) * len(x) > 2.0**62:
        raise RuntimeError(
            "kmeans_step: units come from a step on fewer rows than x has; use the units of a step on all"
            " rows"
        )
    if weights is not None and not bool(((weights >= 0) & (weights <= 1)).all()):
        raise RuntimeError(
            "kmeans_step: weights must be finite, not negative, and at most the largest weight in the step"
            " that made units"
        )
    if not math.isfinite(largest(x)):
        raise RuntimeError("kmeans_step: x holds NaN or infinity; remove or replace those rows")


def require_valid_centers(op: str, name: str, centers: torch.Tensor) -> None:
    """Raise for invalid centers, as for invalid rows."""
    if not bool((centers.double().abs() <= LARGEST).all()):
        raise RuntimeError(f"{op}: {name} must be finite, and at most 2^480 (3e144)")
