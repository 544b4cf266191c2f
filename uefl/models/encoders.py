"""Image encoders: images ``[B, C, H, W]`` to feature maps ``[B, D, H', W']``."""

from __future__ import annotations

import torch
from torch import nn


class BasicBlock(nn.Module):
    """The residual block of ResNet-18 at constant width (He et al. 2016, fig. 5 left), without its last ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        y = self.norm1(self.conv1(x)).relu_()  # in place: the gradients of batch norm do not need what it returned
        out: torch.Tensor = self.norm2(self.conv2(y)).add_(x)
        return out


def small_cnn(in_channels: int, width: int) -> nn.Sequential:
    """Three stages of convolution, residual block and 2x2 max-pool; widths w, 2w, 4w. 28x28 becomes 3x3."""
    stages: list[nn.Module] = []
    for channels in (width, 2 * width, 4 * width):
        # pooled before the block's last ReLU, which is the same function with the same gradient, on a quarter of the values
        stages += [nn.Conv2d(in_channels, channels, 3, padding=1), BasicBlock(channels), nn.MaxPool2d(2), nn.ReLU(inplace=True)]
        in_channels = channels
    return nn.Sequential(*stages)


def vgg16_bn(in_channels: int, pretrained: bool) -> nn.Module:
    """The convolutional part of VGG-16 with batch norm; 32x32 becomes 1x1, D = 512."""
    from torchvision.models import VGG16_BN_Weights
    from torchvision.models import vgg16_bn as build

    features: nn.Sequential = build(weights=VGG16_BN_Weights.IMAGENET1K_V1 if pretrained else None).features
    if in_channels != 3:
        features[0] = nn.Conv2d(in_channels, 64, 3, padding=1)
    return features


class GreyOrRGBConv2d(nn.Conv2d):
    """A convolution of three input channels that also takes one: the same function and gradients as on the grey image replicated.

    Three equal channels see the sum of their weights, so that is what a grey image is convolved with, at a third of the cost.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 1 or 3, H, W] -> [B, C, H, W]."""
        if x.shape[1] == 3:
            return super().forward(x)
        x = x.clone(memory_format=torch.channels_last)  # with strides that say so: those of one channel may mean either
        return nn.functional.conv2d(x, self.weight.sum(1, keepdim=True), self.bias, self.stride, self.padding)


def cnn5x5(width: int) -> nn.Sequential:
    """FedUL's three 5x5 convolutions of w, w and 2w channels, two of them pooled; 28x28 becomes 7x7, D = 2w.

    The dropouts are off unless an arm turns them on (those by label proportions have 0.2).
    """
    stages: list[nn.Module] = []
    for inputs, channels, pool in ((3, width, True), (width, width, True), (width, 2 * width, False)):
        convolution = (GreyOrRGBConv2d if inputs == 3 else nn.Conv2d)(inputs, channels, 5, padding=2)
        # pooled before the ReLU, as above
        stages += [convolution, nn.BatchNorm2d(channels), *([nn.MaxPool2d(2)] if pool else []), nn.ReLU(), nn.Dropout(0.0)]
    return nn.Sequential(*stages)


def resnet18_nopool(in_channels: int, pretrained: bool) -> nn.Module:
    """FedUL's ResNet-18 for small images: without the max-pool behind the stem, D = 512; 32x32 becomes 2x2."""
    net = resnet18(in_channels, pretrained)
    assert isinstance(net, nn.Sequential)
    parts: list[nn.Module] = [part for part in net if not isinstance(part, nn.MaxPool2d)]
    with_dropout = [parts[0], parts[1], parts[2], nn.Dropout(0.0)]  # stem, then a dropout behind it and behind every stage
    for stage in parts[3:]:
        with_dropout += [stage, nn.Dropout(0.0)]
    return nn.Sequential(*with_dropout)


def resnet18(in_channels: int, pretrained: bool) -> nn.Module:
    """ResNet-18 up to the feature map before global pooling, D = 512; 224x224 becomes 7x7, 28x28 and 32x32 become 1x1."""
    from torchvision.models import ResNet18_Weights
    from torchvision.models import resnet18 as build

    net = build(weights=ResNet18_Weights.IMAGENET1K_V1 if pretrained else None)
    if in_channels != 3:
        net.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3, net.layer4)
