"""The definition of ``mc_dropout_mlp``: its passes in float64.

``composed.py`` defines the masks.
"""

from __future__ import annotations

import torch

from ..._dtypes import result_dtype
from .composed import Arguments, Result, probs_of_passes
from .composed import dropout_mask as dropout_mask
from .composed import mc_dropout_mlp_backward as mc_dropout_mlp_backward


def mc_dropout_mlp(given: Arguments) -> Result:
    """Return mean ``[B, C]``, expected entropy ``[B]`` and variance ``[B, C]`` over the passes."""
    wide = given._replace(x=given.x.double(), parameters=given.parameters.double())
    mean = wide.x.new_zeros(len(wide.x), given.widths[-1])
    moment, entropy = torch.zeros_like(mean), wide.x.new_zeros(len(wide.x))
    for t, probs in enumerate(probs_of_passes(wide, torch.ops.uefl_reference.dropout_mask.default)):
        deviation = probs - mean
        mean = mean + deviation / (t + 1)
        moment = moment + deviation * (probs - mean)
        entropy = entropy + torch.special.entr(probs).sum(-1)
    dtype = result_dtype(given.x)
    return mean.to(dtype), (entropy / given.passes).to(dtype), (moment / given.passes).to(dtype)
