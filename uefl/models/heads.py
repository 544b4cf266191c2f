"""The usual head of a network."""

from __future__ import annotations

import torch
from torch import nn


class Head(nn.Module):
    """Linear, activation, dropout, linear, and optionally dropout on the logits."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        classes: int,
        p: float,
        logit_dropout: bool,
        activation: type[nn.Module] = nn.GELU,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.activation = activation()
        self.drop = nn.Dropout(p)
        self.fc2 = nn.Linear(hidden, classes)
        self.logit_drop = nn.Dropout(p if logit_dropout else 0.0)

    def prefix(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the deterministic part: tokens [B, ...] -> hidden [B, hidden]."""
        units: torch.Tensor = self.activation(self.fc1(tokens.flatten(1)))
        return units

    def stochastic(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the layers from the first dropout on: hidden [B, hidden] -> logits [B, classes]."""
        logits: torch.Tensor = self.logit_drop(self.fc2(self.drop(hidden)))
        return logits

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute tokens [B, ...] -> logits [B, classes]."""
        return self.stochastic(self.prefix(tokens))
