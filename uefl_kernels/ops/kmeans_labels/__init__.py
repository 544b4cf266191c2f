"""Rows against centers that stay where they are: what ``KMeans`` does after a fit. Internal; the estimator
checks its arguments."""

from __future__ import annotations

import torch

from ..._library import define, define_composed, forced, resolve
from .. import vq_assign as _defined_first  # noqa: F401
from . import reference


def _fake_labels(
    x: torch.Tensor, centers: torch.Tensor, with_distances: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[0]
    return x.new_empty(n, dtype=torch.int64), x.new_empty(n if with_distances else 0, dtype=torch.float64)


def _fake_distances(x: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[0], centers.shape[0], dtype=dtype)


define(
    "kmeans_labels(Tensor x, Tensor centers, bool with_distances) -> (Tensor labels, Tensor distances)",
    reference=reference.kmeans_labels,
    fallback=reference.kmeans_labels_fallback,
    fake=_fake_labels,
)
define_composed("kmeans_labels", reference.kmeans_labels_around, kernel="vq_assign")
define(
    "kmeans_distances(Tensor x, Tensor centers) -> Tensor",
    reference=reference.kmeans_distances,
    fake=_fake_distances,
)


def kmeans_labels(x: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Return the nearest center of each row: labels [N] of x [N, d] and centers [k, d].

    Raises:
        RuntimeError: x holds NaN or infinity, or values beyond 2^480.
    """
    labels: torch.Tensor = resolve("kmeans_labels", x)(x, centers, False)[0]
    return labels


def kmeans_labels_and_squares(x: torch.Tensor, centers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels, and the squared distance [N] float64 of each row to its center. The same errors."""
    found: tuple[torch.Tensor, torch.Tensor] = resolve("kmeans_labels", x)(x, centers, True)
    return found


def kmeans_distances(x: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row to each center, [N, k]: float64 for float64 x, float32 for all else.
    The same errors."""
    # plain PyTorch on a GPU, whatever the backend
    kernel = torch.ops.uefl_reference if forced() == "reference" else torch.ops.uefl
    distances: torch.Tensor = kernel.kmeans_distances(x, centers.double())
    return distances
