"""The definition of ``fsq`` and its gradient in float64."""

from __future__ import annotations

import torch

from . import composed


def fsq(given: composed.Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the quantized elements ``[..., d]``, and the indices ``[...]``."""
    z, form = given.z.double(), given.form
    columns = [
        sum((column >= threshold).long() for threshold in thresholds)
        for column, thresholds in zip(z.unbind(-1), form.thresholds(), strict=True)
    ]
    level = torch.stack(columns, -1)  # type: ignore[arg-type]
    quantized = composed.value(level, form, torch.float64)
    return torch.where(z.isnan(), z, quantized).to(given.z.dtype), composed.index(level, form, given.indexed)


def fsq_backward(given: composed.FsqGradient) -> torch.Tensor:
    """Return the gradient with respect to z, ``[..., d]``."""
    wide = given._replace(grad=given.grad.double(), z=given.z.double())
    return composed.fsq_backward(wide).to(given.z.dtype)
