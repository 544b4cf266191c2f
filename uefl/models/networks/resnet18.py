"""``resnet18``, and ``resnet18_nopool`` and ``resnet18_3x3`` for small images."""

from __future__ import annotations

import torch
from torch import nn

from .. import pretrained as weights
from .base import Network, network


@network("resnet18")
class ResNet18(Network):
    """ResNet-18 without its pooling and its classifier."""

    ignores = ("width",)
    pretrained = True

    def encoder(self) -> nn.Module:
        """Make the stem and the four stages."""
        return resnet18(self.shape[0], self.settings.pretrained)


@network("resnet18_nopool")
class ResNet18NoPool(Network):
    """FedUL's ResNet-18 for small images, with ResNet's own head."""

    ignores = ("width", "hidden", "dropout", "logit_dropout", "pooled")
    pretrained = True

    def encoder(self) -> nn.Module:
        """Make the stages without the max-pool, and dropouts after them: 32x32 becomes 2x2, D = 512."""
        layers = without_pool(resnet18(self.shape[0], self.settings.pretrained))
        with_dropout = [*layers[:3], nn.Dropout(0.0)]
        for stage in layers[3:]:
            with_dropout += [stage, nn.Dropout(0.0)]
        return nn.Sequential(*with_dropout)

    def head(self, dim: int, positions: int, classes: int) -> nn.Module:
        """Make one linear layer on the mean over the positions."""
        return PooledHead(dim, classes)


@network("resnet18_3x3")
class ResNet18SmallStem(Network):
    """VHL's ResNet-18 for small images: a stem of 3x3 without stride, which no pretrained weights fit."""

    ignores = ("width",)

    def encoder(self) -> nn.Module:
        """Make the stem and the stages without the max-pool: 28x28 and 32x32 become 4x4, D = 512."""
        channels = self.shape[0]
        _, *layers = without_pool(resnet18(channels, False))
        return nn.Sequential(nn.Conv2d(channels, 64, 3, padding=1, bias=False), *layers)


class PooledHead(nn.Module):
    """ResNet's head: the mean over positions, then linear."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute tokens [B, H', W', D] -> logits [B, classes]."""
        logits: torch.Tensor = self.out(tokens.mean((1, 2)))
        return logits


def resnet18(in_channels: int, pretrained: bool | str) -> nn.Sequential:
    """Build ResNet-18 up to the map before pooling, D = 512: 224x224 becomes 7x7, 28x28 and 32x32 1x1."""
    from torchvision import models

    net = models.resnet18(weights=None)
    if pretrained:
        weights.load(net, weights.file_of(pretrained, models.ResNet18_Weights.IMAGENET1K_V1))
        net.conv1 = weights.for_channels(net.conv1, in_channels)
    elif in_channels != 3:
        net.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(
        net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3, net.layer4
    )


def without_pool(net: nn.Sequential) -> list[nn.Module]:
    """Return the layers of a ResNet-18 without its max-pool."""
    return [layer for layer in net if not isinstance(layer, nn.MaxPool2d)]
