"""The definitions of ``kmeans_labels`` and ``kmeans_distances``."""

from __future__ import annotations

from ..vq_assign.reference import search
from . import composed
from .composed import kmeans_distances as kmeans_distances


def kmeans_labels(given: composed.Arguments) -> composed.LabelsAndDistances:
    """Return labels ``[N]`` and squared distances ``[N]``, or ``[0]`` without them."""
    return composed.compose(lambda: search(given.x, given.centers, "l2"), given)
