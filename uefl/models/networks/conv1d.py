"""``conv1d``: convolutions over sequences of tokens."""

from __future__ import annotations

import torch
from torch import nn

from .base import Network, network

_KERNEL = 5


@network("conv1d")
class Conv1d(Network):
    """Embeddings of ``width`` elements, and two convolutions.

    A quarter of the positions remain.
    """

    inputs = "tokens"

    def encoder(self) -> nn.Module:
        """Make an encoder of tokens [B, L] to features [B, width, L / 4, 1], rounded up."""
        width = self.settings.width
        layers: list[nn.Module] = [Embedding(self.of.vocabulary, width)]
        for _ in range(2):
            layers += [
                nn.Conv1d(width, width, _KERNEL, padding=_KERNEL // 2),
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.MaxPool1d(2, ceil_mode=True),
            ]
        return nn.Sequential(*layers, nn.Unflatten(2, (-1, 1)))


class Embedding(nn.Module):
    """Look up the vector of each token, with zeros for padding (token 0)."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, dim, padding_idx=0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed integers, or integers as floats, [B, L] -> [B, dim, L]."""
        found: torch.Tensor = self.table(tokens.long())
        return found.movedim(2, 1)
