"""The definitions of ``kmeans`` and ``kmeans_lloyd``, around the definition of ``kmeans_step``."""

from __future__ import annotations

import torch

from . import composed


def kmeans(given: composed.Arguments) -> composed.Result:
    """Return centers, labels, inertia and iterations of all problems."""
    lloyd = composed.by_steps(torch.ops.uefl_reference.kmeans_step.default, composed.advance)
    return composed.batch(composed.Backend(lloyd, composed.Grid), given)


def kmeans_lloyd(given: composed.LloydArguments) -> composed.Result:
    """Return centers, labels, inertia and iterations of one problem with given centers."""
    return composed.lloyd_of(torch.ops.uefl_reference.kmeans_step.default, composed.advance, given)
