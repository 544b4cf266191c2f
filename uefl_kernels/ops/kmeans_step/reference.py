"""The definitions of ``kmeans_step`` and ``kmeans_units``."""

from __future__ import annotations

from ..vq_assign.reference import search
from . import composed
from .composed import kmeans_units as kmeans_units


def kmeans_step(given: composed.Arguments) -> composed.Result:
    """Return labels, sums, masses and inertia."""
    composed.require_valid_step(given)
    return composed.after(given, search(given.x, given.centers, "l2")[:, 0])
