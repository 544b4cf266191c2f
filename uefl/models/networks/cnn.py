"""``cnn``: three residual stages."""

from __future__ import annotations

import torch
from torch import nn

from .base import Network, network


@network("cnn")
class CNN(Network):
    """Three residual stages."""

    def encoder(self) -> nn.Module:
        """Make three stages of widths w, 2w and 4w, which map 28x28 to 3x3."""
        inputs, width = self.shape[0], self.settings.width
        stages: list[nn.Module] = []
        for channels in (width, 2 * width, 4 * width):
            # max-pool before the last ReLU of the block: function and gradient are the same, on a quarter of
            # the values
            stages += [
                nn.Conv2d(inputs, channels, 3, padding=1),
                BasicBlock(channels),
                nn.MaxPool2d(2),
                nn.ReLU(inplace=True),
            ]
            inputs = channels
        return nn.Sequential(*stages)


class BasicBlock(nn.Module):
    """The residual block of ResNet-18 (He et al. 2016, figure 5) at constant width, without its last ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [B, C, H, W] -> [B, C, H, W]."""
        # in place: the gradients of batch norm do not need its output
        y = self.norm1(self.conv1(x)).relu_()
        out: torch.Tensor = self.norm2(self.conv2(y)).add_(x)
        return out
