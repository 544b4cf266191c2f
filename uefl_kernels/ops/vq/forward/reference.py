"""The definition of ``vq_forward``."""

from __future__ import annotations

from ...vq_assign.distances import require_valid
from ...vq_assign.reference import search
from . import composed


def vq_forward(given: composed.Arguments) -> composed.Result:
    """Return quantized, indices, error, counts, largest and fixed.

    ``exact`` makes no difference here.
    """
    require_valid("vq_forward", given.codebook)
    return composed.around(search, given)
