"""The definition of ``vq``: a loss of the error of ``vq_forward``, and sums of its counts."""

from __future__ import annotations

import torch

from ..vq_assign.distances import require_valid
from . import composed
from .forward import composed as forward


def vq(given: composed.Arguments) -> composed.Result:
    """Return quantized, indices, loss, counts and sums."""
    require_valid("vq", given.codebook)
    return composed.compose(torch.ops.uefl_reference.vq_forward.default, forward.add, given)
