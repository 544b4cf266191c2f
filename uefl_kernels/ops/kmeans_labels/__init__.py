"""Labels and distances of rows for fixed centers, as ``KMeans`` needs them after a fit.

Internal; the estimator checks its arguments.
"""

from __future__ import annotations

import torch

from ..._dtypes import result_dtype
from ..._library import define, define_composed, forced, resolve
from .. import vq_assign as _vq_assign  # noqa: F401
from . import composed


def _fake_labels(given: composed.Arguments) -> composed.LabelsAndDistances:
    x, _, with_distances = given
    n = x.shape[0]
    return x.new_empty(n, dtype=torch.int64), x.new_empty(n if with_distances else 0, dtype=torch.float64)


def _fake_distances(given: composed.DistanceArguments) -> torch.Tensor:
    return given.x.new_empty(given.x.shape[0], given.centers.shape[0], dtype=result_dtype(given.x))


define(
    __name__,
    "kmeans_labels",
    composed.Arguments,
    ["labels", "distances"],
    fake=_fake_labels,
    fallback=composed.fallback,
)
define_composed("kmeans_labels", composed.around, kernel="vq_assign")
define(
    __name__,
    "kmeans_distances",
    composed.DistanceArguments,
    ["distances"],
    fake=_fake_distances,
    fallback=composed.kmeans_distances,
)


def kmeans_labels(x: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Return the nearest center of each row: labels [N] of x [N, d] and centers [k, d].

    Raises:
        RuntimeError: x holds NaN or infinity, or values beyond 2^480.
    """
    labels: torch.Tensor = resolve("kmeans_labels", x)(*composed.Arguments(x, centers, False))[0]
    return labels


def kmeans_labels_and_squares(x: torch.Tensor, centers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels, and the squared distance [N] float64 of each row to its center.

    The function raises the same errors as :func:`kmeans_labels`.
    """
    found: composed.LabelsAndDistances = resolve("kmeans_labels", x)(*composed.Arguments(x, centers, True))
    return found


def kmeans_distances(x: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row to each center, [N, k]: float64 for float64 x, float32 for all else.

    The function raises the same errors as :func:`kmeans_labels`.
    """
    # plain PyTorch on a GPU, whatever the backend
    kernel = torch.ops.uefl_reference if forced() == "reference" else torch.ops.uefl
    distances: torch.Tensor = kernel.kmeans_distances(*composed.DistanceArguments(x, centers.double()))
    return distances
