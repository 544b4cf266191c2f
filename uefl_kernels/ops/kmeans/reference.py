"""The definition of ``kmeans``: ``composed.batch`` around the definition of ``kmeans_step``."""

from __future__ import annotations

import torch

from . import composed


def kmeans(given: composed.Arguments) -> composed.Result:
    """Return centers, labels, inertia and iterations of all problems."""
    parts = composed.Backend(torch.ops.uefl_reference.kmeans_step.default, composed.Grid, composed.advance)
    return composed.batch(parts, given)
