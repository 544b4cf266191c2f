"""A module whose float32 tensors stay float32 when the model around it is cast to half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


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
