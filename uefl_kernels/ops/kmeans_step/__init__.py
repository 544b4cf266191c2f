"""``kmeans_step``: one step of Lloyd's algorithm, which reads the rows once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..._checks import check_tensor, packed
from ..._kmeans_checks import check_shape
from ..._library import define, define_triton, forced, resolve
from . import composed


class KMeansUnits(NamedTuple):
    """Origin and units of the fixed-point sums, which a step needs before it reads the first row."""

    middle: torch.Tensor
    """``[d]`` float64: the mean of the smallest and the largest element of each column."""
    scale: torch.Tensor
    """``[d]`` float64: the number of units of a sum in 1.0, a power of two."""
    mass_scale: torch.Tensor
    """scalar, float64: the number of units of a mass in 1.0."""
    weight_unit: torch.Tensor
    """scalar, float64: a power of two that no weight exceeds."""


class KMeansStep(NamedTuple):
    """Result of ``kmeans_step``, on the device of x."""

    centers: torch.Tensor
    """``[k, d]``, the means of the clusters: float64 for float64 x, otherwise float32. A cluster
    without mass keeps its center."""
    labels: torch.Tensor
    """``[N]`` int64: the index of the nearest center, among the centers before the step."""
    sums: torch.Tensor
    """``[k, d]`` float64: weighted sums of the rows of each cluster."""
    masses: torch.Tensor
    """``[k]`` float64: the sum of the weights of the rows of each cluster; without weights, the number of
    rows."""
    inertia: torch.Tensor
    """scalar, float64: weighted sum of the squared distances of the rows to their centers before the step."""
    units: KMeansUnits
    """The argument ``units`` of the next step on these rows."""


def _fake_units(given: composed.UnitsArguments) -> composed.Units:
    x = given.x
    column, number = x.new_empty(x.shape[1], dtype=torch.float64), x.new_empty((), dtype=torch.float64)
    return column, torch.empty_like(column), number, torch.empty_like(number)


def _fake(given: composed.Arguments) -> composed.Result:
    x, centers = given[:2]
    return (
        x.new_empty(x.shape[0], dtype=torch.int64),
        x.new_empty(centers.shape, dtype=torch.int64),
        x.new_empty(centers.shape[0], dtype=torch.int64),
        x.new_empty((), dtype=torch.float64),
    )


define(
    __name__,
    "kmeans_step",
    composed.Arguments,
    ["labels", "sums", "masses", "inertia"],
    fake=_fake,
    fallback=composed.fallback,
)
define_triton("kmeans_step")
define(
    __name__,
    "kmeans_units",
    composed.UnitsArguments,
    ["middle", "scale", "mass_scale", "weight_unit"],
    fake=_fake_units,
    fallback=composed.kmeans_units,
)


def kmeans_step(
    x: torch.Tensor,
    centers: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    units: KMeansUnits | None = None,
) -> KMeansStep:
    """Run one step of Lloyd's algorithm, as a building block for custom loops.

    The step assigns each row to its nearest center and returns the new centers, which are the means of the
    clusters.

    The same input gives the same bits on every backend and for any number of threads: labels are the argmin
    of the float64 distance, and sums over rows are sums of 64-bit integers. :func:`kmeans` adds seeding, rows
    for empty clusters, and a stopping rule.

    Args:
        x: ``[N, d]``, float32, bfloat16, float16 or float64; any strides. Values are finite, and at
            most 2^480 in float64. This is checked on the CPU only. N = 0 is legal.
        centers: ``[k, d]``, finite; this is checked on the CPU only. They are first rounded to float32, or to
            float64 for float64 x.
        weights: ``[N]``, not negative, not all zero, at most 2^1000; see :func:`kmeans`. Default: ones.
        units: ``units`` of an earlier step on the same rows with the same weights, or on a larger set that
            contains these rows. With units, the step does not read x a second time to find the extremes of
            the columns. On the CPU, more rows or greater weights than in the earlier step are an error.
            Values outside of the earlier extremes are not detected: they overflow, and the sums are wrong.

    Returns:
        :class:`KMeansStep` ``(centers, labels, sums, masses, inertia, units)``. No gradient. The error
        of a mass is at most about 2^-(62 - log2 N) times the largest weight. The error of a sum is at most
        about the same factor times half the distance between the extremes of its column.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit.
        RuntimeError: x, weights or centers are not valid, or a forced backend is absent.

    Source: Lloyd 1982, "Least squares quantization in PCM".

    Equivalent to::

        labels = torch.cdist(x.double(), centers.double()).argmin(1)
        masses = torch.zeros(k).double().index_add_(0, labels, weights.double())
        sums = torch.zeros(k, d).double().index_add_(0, labels, weights[:, None] * x.double())
        inertia = (weights * (x.double() - centers.double()[labels]).square().sum(1)).sum()
        means = torch.where(masses[:, None] > 0, sums / masses[:, None], centers)
    """
    _check(x, centers, weights, units)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, before = x.detach(), packed("kmeans_step", "centers", centers.detach()).to(wide)
    mass = None if weights is None else weights.detach().double()
    if units is None:
        # no GPU kernel computes the units: every backend runs plain PyTorch
        kernel = torch.ops.uefl_reference if forced() == "reference" else torch.ops.uefl
        units = KMeansUnits(*kernel.kmeans_units(x, mass))
    middle, scale, mass_scale, weight_unit = units
    mass = None if mass is None else mass / weight_unit
    given = composed.Arguments(x, before, mass, middle, scale, mass_scale, with_inertia=True)
    labels, counted, counts, inertia = resolve("kmeans_step", x)(*given)
    masses = counts.double() / mass_scale
    centered = counted.double() / scale
    means = torch.where((counts > 0)[:, None], (middle + centered / masses[:, None]).to(wide), before)
    return KMeansStep(
        means,
        labels,
        (centered + middle * masses[:, None]) * weight_unit,
        masses * weight_unit,
        inertia * weight_unit,
        units,
    )


def _check(
    x: torch.Tensor, centers: torch.Tensor, weights: torch.Tensor | None, units: KMeansUnits | None
) -> None:
    op = "kmeans_step"
    named = {"x": x, "centers": centers} | ({} if weights is None else {"weights": weights})
    for name, tensor in named.items():
        check_tensor(op, name, tensor)
        if tensor.device != x.device:
            raise ValueError(f"{op}: x is on {x.device} and {name} on {tensor.device}; move one of them")
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{op}: x must have shape [N, d] with d of at least 1, got {list(x.shape)}")
    n, d = x.shape
    if centers.dim() != 2 or centers.shape[0] == 0 or centers.shape[1] != d:
        raise ValueError(
            f"{op}: centers must have shape [k, {d}] with k of at least 1, got {list(centers.shape)}"
        )
    if weights is not None:
        check_shape(op, "weights", weights.shape, [n])
    if units is not None:
        if not isinstance(units, KMeansUnits):
            raise TypeError(
                f"{op}: units must come from an earlier step (KMeansStep.units), got {type(units).__name__}"
            )
        check_shape(op, "units.middle", units.middle.shape, [d])
        if units.middle.device != x.device:
            raise ValueError(f"{op}: x is on {x.device} and units on {units.middle.device}; move one of them")
