"""Which quantisers of a stack run in a call of training with ``quantize_dropout``."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import _distributed


class QuantizeDropout(NamedTuple):
    """Of ``quantizers`` keep those up to a random one from ``cutoff`` on, rounded up to a multiple."""

    quantizers: int
    cutoff: int
    multiple: int

    def check(self, layer: str) -> None:
        """ValueError for a cutoff or a multiple that does not fit."""
        if not 0 <= self.cutoff < self.quantizers or self.multiple < 1:
            raise ValueError(
                f"{layer}: quantize_dropout_cutoff_index={self.cutoff} must be 0 to {self.quantizers - 1} and"
                f" quantize_dropout_multiple_of={self.multiple} at least 1"
            )

    def kept(self, device: torch.device, seed: int | None) -> int:
        """How many run: drawn from torch's generator, the same in all processes; all of them on fake tensors, which have no values."""
        if seed is not None:  # as the peer draws for this seed
            last = random.Random(seed).randrange(self.cutoff, self.quantizers)
        else:
            drawn = torch.randint(self.cutoff, self.quantizers, ())
            if isinstance(drawn, FakeTensor):
                return self.quantizers
            last = int(drawn if _distributed.rank_and_size()[1] == 1 else _distributed.same_on_all(drawn.to(device)))
        return min(self.quantizers, -(-(last + 1) // self.multiple) * self.multiple)
