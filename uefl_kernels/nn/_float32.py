"""What stays float32 when the model around it is cast to half precision, or runs in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """For what makes codewords or measures how near they are: 8 bits do not tell them apart, and indices are decoded without autocast.

    Nothing where there is no autocast: ``torch.export`` cannot take one.
    """
    active = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if active else contextlib.nullcontext()


class Float32Module(nn.Module):
    """Codewords and their averages: neither fits into the 8 bits of bfloat16, and the ops take them beside half-precision input.

    Casts to float64 and moves between devices work as ever.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float32Module:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            reduced = tensor.dtype == torch.float32 and moved.dtype in (torch.float16, torch.bfloat16)
            return tensor.to(moved.device) if reduced else moved

        super()._apply(keep, recurse)
        return self
