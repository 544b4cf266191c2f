"""The definition of ``vq_forward``."""

from __future__ import annotations

import torch

from ...vq_assign.reference import require_valid, search
from . import composed


def vq_forward(
    x: torch.Tensor, codebook: torch.Tensor, scales: torch.Tensor | None, metric: str, exact: bool
) -> composed.Result:
    """x [..., D], codebook [K, d] | [S, K, d], scales [codes] -> see ``ops/vq/forward/__init__.py``; ``exact`` is always true here."""
    require_valid("vq_forward", codebook)
    return composed.around(search, x, codebook, scales, metric)
