"""``Sequential``: modules in a row, one of them a quantizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._codebook import Coder, undisturbed


class Sequential(nn.Module):
    """Call modules in a row, exactly one of them a quantizer, and return its further results too.

    Args:
        *fns: the modules; the first takes ``[..., dim]`` or what else it is made for.

    Raises:
        ValueError: none or several quantizers.

    Source: none; it only passes results on.

    Equivalent to: ``vector_quantize_pytorch.Sequential`` 1.32 with the same arguments.
    """

    def __init__(self, *fns: nn.Module) -> None:
        super().__init__()
        found = sum(isinstance(fn, Coder) for fn in fns)
        if found != 1:
            raise ValueError(f"Sequential: expected exactly one quantizer, got {found}")
        self.fns = nn.ModuleList(fns)

    @property
    def _place(self) -> int:
        return next(place for place, fn in enumerate(self.fns) if isinstance(fn, Coder))

    @property
    def bits_per_vector(self) -> float:
        """Bits of the indices of a vector of the quantizer."""
        return float(self.fns[self._place].bits_per_vector)

    def encode(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the indices of the quantizer for x in evaluation mode; nothing is updated."""
        with undisturbed(self):
            for fn in self.fns[: self._place]:
                x = fn(x)
            indices: torch.Tensor = self.fns[self._place](x, **kwargs)[1]
        return indices

    def decode(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the output of the modules behind the quantizer for these indices."""
        x: torch.Tensor = self.fns[self._place].decode(indices)
        for fn in self.fns[self._place + 1 :]:
            x = fn(x)
        return x

    def forward(self, x: torch.Tensor, **kwargs: Any) -> tuple[Any, ...]:
        """Return the last output and the other results of the quantizer, which takes the named arguments."""
        rest: list[Any] = []
        for fn in self.fns:
            if isinstance(fn, Coder):
                x, *rest = fn(x, **kwargs)
            else:
                x = fn(x)
        return (x, *rest)
