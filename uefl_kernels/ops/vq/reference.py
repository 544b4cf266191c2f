"""The definition of ``vq``: the definition of ``vq_forward``, a loss of its error, and sums of its counts."""

from __future__ import annotations

from ..vq_assign.reference import require_valid
from . import composed
from .forward import composed as forward
from .forward.reference import vq_forward


def vq(given: composed.Arguments) -> composed.Result:
    """x [..., D], codebook [K, d] | [S, K, d] -> quantized, indices, loss, counts, sums (see ``ops/vq/__init__.py``)."""
    require_valid("vq", given.codebook)
    return composed.compose(vq_forward, forward.add, given)
