"""The definition of ``rvq``: ``vq`` of the reference, stage by stage."""

from __future__ import annotations

from ..vq.reference import vq
from . import composed


def rvq(given: composed.Arguments) -> composed.Result:
    """Return quantized, indices, losses, counts and sums."""
    return composed.compose(vq, given)
