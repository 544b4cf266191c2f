"""``Sequential``: modules in a row, one of them a quantizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._codebook import Coder, undisturbed


class Sequential(nn.Module):
    """Call modules in a row, exactly one of them a quantizer, and return its further results too.

    Args:
        *fns: the modules. The first one gets the input of this module, usually ``[..., dim]``.

    Raises:
        ValueError: the number of quantizers is not 1.

    Source: none; the module only passes results on.

    Equivalent to: ``vector_quantize_pytorch.Sequential`` 1.32 with the same arguments.
    """

    def __init__(self, *fns: nn.Module) -> None:
        super().__init__()
        found = sum(isinstance(fn, Coder) for fn in fns)
        if found != 1:
            raise ValueError(f"Sequential: expected exactly one quantizer, got {found}")
        self.fns = nn.ModuleList(fns)

    def _split(self) -> tuple[list[nn.Module], Coder, list[nn.Module]]:
        """Return the modules before the quantizer, the quantizer, and the modules behind it."""
        fns = list(self.fns)
        place, quantizer = next((place, fn) for place, fn in enumerate(fns) if isinstance(fn, Coder))
        return fns[:place], quantizer, fns[place + 1 :]

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector of the quantizer."""
        bits: Any = self._split()[1].bits_per_vector
        return float(bits)

    def encode(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the indices of the quantizer for x in evaluation mode.

        Nothing is updated.
        """
        before, quantizer, _ = self._split()
        with undisturbed(self):
            for fn in before:
                x = fn(x)
            indices: torch.Tensor = quantizer(x, **kwargs)[1]
        return indices

    def decode(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the output of the modules behind the quantizer for these indices."""
        _, quantizer, behind = self._split()
        x = quantizer.decode(indices)
        for fn in behind:
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
