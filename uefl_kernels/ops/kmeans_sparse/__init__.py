"""Cluster the rows of a SciPy matrix for ``KMeans``.

The functions are internal: the estimator checks their arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..._library import define, resolve
from ..kmeans import composed as kmeans
from ..kmeans.grid import Grid
from . import composed
from .composed import SparseRows as SparseRows


def _fake(given: composed.Arguments) -> kmeans.Fit:
    values, init = given.values, given.init
    return kmeans.Fit(
        torch.empty_like(init),
        values.new_empty(given.offsets.shape[0] - 1, dtype=torch.int64),
        values.new_empty((), dtype=torch.float64),
        values.new_empty((), dtype=torch.int64),
    )


def _fake_labels(given: composed.SearchArguments) -> composed.LabelsAndDistances:
    values, n = given.values, given.offsets.shape[0] - 1
    return values.new_empty(n, dtype=torch.int64), values.new_empty(n, dtype=torch.float64)


def _fake_distances(given: composed.SearchArguments) -> torch.Tensor:
    return given.values.new_empty(given.offsets.shape[0] - 1, given.centers.shape[0])


def _fake_products(given: composed.SearchArguments) -> torch.Tensor:
    return given.values.new_empty(given.offsets.shape[0] - 1, given.centers.shape[0], dtype=torch.float64)


define(
    __name__,
    "kmeans_sparse",
    composed.Arguments,
    ["centers", "labels", "inertia", "iterations"],
    fake=_fake,
    fallback=composed.fallback,
)
define(
    __name__,
    "kmeans_sparse_labels",
    composed.SearchArguments,
    ["labels", "squares"],
    fake=_fake_labels,
    fallback=composed.labels,
)
define(
    __name__,
    "kmeans_sparse_distances",
    composed.SearchArguments,
    ["distances"],
    fake=_fake_distances,
    fallback=composed.distances,
)


define(
    __name__,
    "kmeans_sparse_products",
    composed.SearchArguments,
    ["products"],
    fake=_fake_products,
    fallback=composed.products,
)


def kmeans_sparse(
    rows: SparseRows, weights: torch.Tensor | None, asked: kmeans.FitOptions, spherical: bool
) -> kmeans.Fit:
    """Return the best fit of all starts.

    ``rows`` and given centers have length 1 if ``spherical``.

    Raises:
        RuntimeError: the rows contain NaN or infinity, or values beyond 2^480.
    """
    k, seed = asked.k, asked.seed
    if asked.given is None:
        seeding = composed.SparseData(rows, weights).grid
        starts = (rows.take(seeding.seeds(asked.method, k, seed, restart)) for restart in range(asked.n_init))
    else:
        starts = (start for start in [asked.given])
    op = composed.kernels().kmeans_sparse
    fits = [
        kmeans.Fit(*op(*rows.format, start, weights, spherical, asked.max_iter, asked.tol))
        for start in starts
    ]
    return min(fits, key=lambda fit: float(fit.inertia))


def kmeans_sparse_by_steps(
    rows: SparseRows,
    weights: torch.Tensor | None,
    asked: kmeans.FitOptions,
    spherical: bool,
    advance: Callable[[kmeans.KMeansStepFunction], kmeans.Advance],
) -> kmeans.Fit:
    """Compute ``kmeans_sparse`` step by step.

    ``advance`` makes the function that ends an iteration.
    """
    step = resolve("kmeans_step", rows.values)
    backend = kmeans.Backend(kmeans.by_steps(step, advance(step)), Grid)
    return kmeans.fit(backend, composed.SparseData(rows, weights), asked, spherical)


def kmeans_sparse_labels(rows: SparseRows, centers: torch.Tensor) -> composed.LabelsAndDistances:
    """Return the exact nearest center of each row, and the squared distance to it up to rounding.

    Raise as :func:`kmeans_sparse`.
    """
    found: composed.LabelsAndDistances = composed.kernels().kmeans_sparse_labels(
        *rows.format, centers.double()
    )
    return found


def kmeans_sparse_distances(rows: SparseRows, centers: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row to each center, [N, k] in the dtype of the rows.

    Raise as :func:`kmeans_sparse`.
    """
    found: torch.Tensor = composed.kernels().kmeans_sparse_distances(*rows.format, centers.double())
    return found
