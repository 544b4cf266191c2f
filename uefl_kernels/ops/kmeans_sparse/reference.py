"""Define the ops on sparse rows by the ops on the same dense rows."""

from __future__ import annotations

import torch

from ..kmeans import composed as kmeans
from ..kmeans_labels import reference as labels_of_dense
from ..kmeans_labels.composed import Arguments, DistanceArguments
from ..kmeans_step import composed as steps
from . import composed


def _dense(given: composed.Arguments | composed.SearchArguments, d: int) -> torch.Tensor:
    x = given.values.new_zeros(len(given.offsets) - 1, d)
    row = torch.arange(len(x)).repeat_interleave(given.offsets.diff())
    x[row, given.columns.long()] = given.values
    return x


def kmeans_sparse(given: composed.Arguments) -> kmeans.Fit:
    """Return centers, labels, inertia and iterations."""
    x = _dense(given, given.init.shape[1])
    steps.require_valid("kmeans", x, given.weights)
    lloyd = kmeans.by_steps(torch.ops.uefl_reference.kmeans_step.default, kmeans.advance)
    data = kmeans.Problem(x, given.weights, kmeans.Grid)
    return lloyd(data, given.init, data.limit(given.tol), given.spherical, given.max_iter)


def kmeans_sparse_labels(given: composed.SearchArguments) -> composed.LabelsAndDistances:
    """Return the nearest center of each row, and the squared distance to it."""
    composed.require_order(given)
    x = _dense(given, given.centers.shape[1])
    return labels_of_dense.kmeans_labels(Arguments(x, given.centers.to(x.dtype), True))


def kmeans_sparse_distances(given: composed.SearchArguments) -> torch.Tensor:
    """Return the distance of each row to each center."""
    composed.require_order(given)
    x = _dense(given, given.centers.shape[1])
    return labels_of_dense.kmeans_distances(DistanceArguments(x, given.centers))


def kmeans_sparse_products(given: composed.SearchArguments) -> torch.Tensor:
    """Return the products of all rows and centers, in float64."""
    return _dense(given, given.centers.shape[1]).double() @ given.centers.T
