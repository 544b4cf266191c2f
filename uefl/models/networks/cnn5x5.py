"""``cnn5x5``: FedUL's network for small images."""

from __future__ import annotations

import torch
from torch import nn

from .base import Network, network


@network("cnn5x5")
class CNN5x5(Network):
    """Three 5x5 convolutions, and a head of its own."""

    ignores = ("hidden", "dropout", "logit_dropout", "pooled")

    def encoder(self) -> nn.Module:
        """Make the convolutions of w, w and 2w channels, two of them pooled.

        w is ``width``. 28x28 becomes 7x7, D = 2w.

        The dropouts have p = 0, unless an arm sets another p (algorithms by label proportions set 0.2).
        """
        width, stages = self.settings.width, list[nn.Module]()
        for inputs, channels, pool in ((3, width, True), (width, width, True), (width, 2 * width, False)):
            convolution = (GrayOrRGBConv2d if inputs == 3 else nn.Conv2d)(inputs, channels, 5, padding=2)
            # pooling before the ReLU gives the same values and gradients with a quarter of the work
            stages += [
                convolution,
                nn.BatchNorm2d(channels),
                *([nn.MaxPool2d(2)] if pool else []),
                nn.ReLU(),
                nn.Dropout(0.0),
            ]
        return nn.Sequential(*stages)

    def head(self, dim: int, positions: int, classes: int) -> nn.Module:
        """Make the head of two hidden layers."""
        return DeepHead(positions * dim, self.settings.width, classes)


class DeepHead(nn.Module):
    """FedUL's head: linear, batch norm, ReLU and dropout to 32w units, the same to 8w, then linear.

    w is ``width``. The dropouts have p = 0, unless an arm sets another p.
    """

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for size, units in ((inputs, 32 * width), (32 * width, 8 * width)):
            blocks += [nn.Linear(size, units), nn.BatchNorm1d(units), nn.ReLU(), nn.Dropout(0.0)]
        self.hidden = nn.Sequential(*blocks)
        self.out = nn.Linear(8 * width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute tokens [B, ...] -> logits [B, classes]."""
        logits: torch.Tensor = self.out(self.hidden(tokens.flatten(1)))
        return logits


class GrayOrRGBConv2d(nn.Conv2d):
    """A convolution of three input channels that also takes images of one channel.

    Function and gradients are the same as for three copies of the gray image.

    Three equal channels are convolved with the sum of their weights, so a gray image needs one channel and a
    third of the cost.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [B, 1 or 3, H, W] -> [B, C, H, W]."""
        if x.shape[1] == 3:
            return super().forward(x)
        # set the strides, because the strides of images of one channel fit either layout
        x = x.clone(memory_format=torch.channels_last)
        return nn.functional.conv2d(x, self.weight.sum(1, keepdim=True), self.bias, self.stride, self.padding)
