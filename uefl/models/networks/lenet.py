"""``lenet`` and ``pixel_mlp``: FedCR's networks, without batch norm."""

from __future__ import annotations

import math

from torch import nn

from .base import Network, network


@network("pixel_mlp")
class PixelMLP(Network):
    """FedCR's network for EMNIST: two layers of ``hidden`` units with ReLU, the second one in the head."""

    ignores = ("width", "pooled", "norm_layer", "frozen_batch_norm")
    activation = nn.ReLU

    def encoder(self) -> nn.Module:
        """Make the first layer: an image becomes one feature vector, D = ``hidden``."""
        return nn.Sequential(*self.layer(math.prod(self.shape)))

    def layer(self, inputs: int) -> list[nn.Module]:
        """Make the modules of the first layer, for images or maps with this number of elements."""
        units = self.settings.hidden
        return [nn.Flatten(), nn.Linear(inputs, units), nn.ReLU(), nn.Unflatten(1, (units, 1, 1))]


@network("lenet")
class LeNet(PixelMLP):
    """FedCR's network for FashionMNIST and CIFAR: two 5x5 convolutions, then the layers of ``pixel_mlp``."""

    def encoder(self) -> nn.Module:
        """Make convolutions of 4 and 12 channels for gray images, or of 64 and 64, and the first layer.

        28x28 becomes 4x4 and 32x32 becomes 5x5 before the first layer, which makes one feature vector of it.
        """
        (inputs, *sides), stages = self.shape, list[nn.Module]()
        for channels in (4, 12) if inputs == 1 else (64, 64):
            # pooling before the ReLU gives the same values and gradients with a quarter of the work
            stages += [nn.Conv2d(inputs, channels, 5), nn.MaxPool2d(2), nn.ReLU()]
            # images that are too small get any size here; the first pass refuses them
            inputs, sides = channels, [max((side - 4) // 2, 1) for side in sides]
        return nn.Sequential(*stages, *self.layer(inputs * math.prod(sides)))
