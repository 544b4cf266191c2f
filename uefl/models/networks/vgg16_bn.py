"""``vgg16_bn``: the convolutions of VGG-16 with batch norm."""

from __future__ import annotations

from torch import nn

from .. import pretrained as weights
from .base import Network, network


@network("vgg16_bn")
class VGG16(Network):
    """The convolutions of VGG-16 with batch norm."""

    ignores = ("width",)
    pretrained = True

    def encoder(self) -> nn.Module:
        """Make the convolutions: 32x32 becomes 1x1, D = 512."""
        from torchvision import models

        channels, pretrained = self.shape[0], self.settings.pretrained
        net = models.vgg16_bn(weights=None)
        features: nn.Sequential = net.features
        if pretrained:
            weights.load(net, weights.file_of(pretrained, models.VGG16_BN_Weights.IMAGENET1K_V1))
            features[0] = weights.for_channels(features[0], channels)
        elif channels != 3:
            features[0] = nn.Conv2d(channels, 64, 3, padding=1)
        return features
