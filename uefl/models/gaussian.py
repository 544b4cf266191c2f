"""An encoder to Gaussian features, and a linear head on a sample of them, for FedSR and FedCR."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from .net import as_tokens, usual


class Gaussian(NamedTuple):
    """Independent normal features of B images."""

    mean: torch.Tensor
    """``[B, d]`` float32"""
    std: torch.Tensor
    """``[B, d]`` float32, positive"""

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """Return features of the shape of ``noise`` ``[..., B, d]``, which is N(0, 1)."""
        return self.mean + self.std * noise


class GaussianNet(nn.Module):
    """Encoder, mean and deviation of ``dim`` features, linear head.

    Args:
        net: a network of an encoder and a :class:`Head`. The encoder is used; with ``hidden`` also the hidden
            layer of the head.
        hidden: put this layer and its activation between the encoder and the Gaussian.

    Raises:
        UserError: the network is not an encoder and a :class:`Head`.
    """

    def __init__(self, net: nn.Module, dim: int, *, hidden: bool) -> None:
        super().__init__()
        net, head = usual(net, "Gaussian features need")
        first, last = head.fc1, head.fc2
        self.encoder, self.pooled = net.encoder, net.pooled
        self.hidden = nn.Sequential(first, head.activation) if hidden else nn.Identity()
        self.gaussian = nn.Linear(first.out_features if hidden else first.in_features, 2 * dim)
        self.head = nn.Linear(dim, last.out_features)

    def distribution(self, images: torch.Tensor) -> Gaussian:
        """Return the Gaussians of the features of normalized images ``[B, C, H, W]``."""
        tokens = as_tokens(self.encoder(images), self.pooled)
        mean, std = self.gaussian(self.hidden(tokens.flatten(1))).float().chunk(2, 1)
        return Gaussian(mean, nn.functional.softplus(std))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[B, classes]`` of the means, without a draw."""
        logits: torch.Tensor = self.head(self.distribution(images).mean)
        return logits
