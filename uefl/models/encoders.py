"""Image encoders: images ``[B, C, H, W]`` to feature maps ``[B, D, H', W']``.

``pretrained`` is False, or True for the ImageNet weights in torchvision's cache, or a file of weights for the
same network. Nothing is downloaded. A grey image is convolved with the sum over the three channels of the
pretrained first layer: with what its three equal channels would give.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UserError


class BasicBlock(nn.Module):
    """The residual block of ResNet-18 at constant width (He et al. 2016, fig. 5 left), without its last
    ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        # in place: the gradients of batch norm do not need its output
        y = self.norm1(self.conv1(x)).relu_()
        out: torch.Tensor = self.norm2(self.conv2(y)).add_(x)
        return out


def small_cnn(in_channels: int, width: int) -> nn.Sequential:
    """Three stages of convolution, residual block and 2x2 max-pool; widths w, 2w, 4w. 28x28 becomes 3x3."""
    stages: list[nn.Module] = []
    for channels in (width, 2 * width, 4 * width):
        # pooled before the block's last ReLU, which is the same function with the same gradient, on a quarter
        # of the values
        stages += [
            nn.Conv2d(in_channels, channels, 3, padding=1),
            BasicBlock(channels),
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
        ]
        in_channels = channels
    return nn.Sequential(*stages)


def vgg16_bn(in_channels: int, pretrained: bool | str) -> nn.Module:
    """The convolutional part of VGG-16 with batch norm; 32x32 becomes 1x1, D = 512."""
    from torchvision.models import VGG16_BN_Weights
    from torchvision.models import vgg16_bn as build

    net = build(weights=None)
    features: nn.Sequential = net.features
    if pretrained:
        _load(net, _source(pretrained, VGG16_BN_Weights.IMAGENET1K_V1))
        features[0] = _for_channels(features[0], in_channels)
    elif in_channels != 3:
        features[0] = nn.Conv2d(in_channels, 64, 3, padding=1)
    return features


class GreyOrRGBConv2d(nn.Conv2d):
    """A convolution of three input channels that also takes one: the same function and gradients as on the
    grey image replicated.

    Three equal channels are convolved with the sum of their weights, so a gray image needs one channel and a
    third of the cost.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 1 or 3, H, W] -> [B, C, H, W]."""
        if x.shape[1] == 3:
            return super().forward(x)
        # with strides that say so: images of one channel may mean either
        x = x.clone(memory_format=torch.channels_last)
        return nn.functional.conv2d(x, self.weight.sum(1, keepdim=True), self.bias, self.stride, self.padding)


def cnn5x5(width: int) -> nn.Sequential:
    """FedUL's three 5x5 convolutions of w, w and 2w channels, two of them pooled; 28x28 becomes 7x7, D = 2w.

    The dropouts are off unless an arm turns them on (those by label proportions have 0.2).
    """
    stages: list[nn.Module] = []
    for inputs, channels, pool in ((3, width, True), (width, width, True), (width, 2 * width, False)):
        convolution = (GreyOrRGBConv2d if inputs == 3 else nn.Conv2d)(inputs, channels, 5, padding=2)
        # pooled before the ReLU, as above
        stages += [
            convolution,
            nn.BatchNorm2d(channels),
            *([nn.MaxPool2d(2)] if pool else []),
            nn.ReLU(),
            nn.Dropout(0.0),
        ]
    return nn.Sequential(*stages)


def resnet18_nopool(in_channels: int, pretrained: bool | str) -> nn.Module:
    """FedUL's ResNet-18 for small images: without the max-pool behind the stem, D = 512; 32x32 becomes
    2x2."""
    net = resnet18(in_channels, pretrained)
    assert isinstance(net, nn.Sequential)
    parts: list[nn.Module] = [part for part in net if not isinstance(part, nn.MaxPool2d)]
    # stem, then a dropout behind it and behind every stage
    with_dropout = [parts[0], parts[1], parts[2], nn.Dropout(0.0)]
    for stage in parts[3:]:
        with_dropout += [stage, nn.Dropout(0.0)]
    return nn.Sequential(*with_dropout)


def resnet18(in_channels: int, pretrained: bool | str) -> nn.Module:
    """ResNet-18 up to the feature map before global pooling, D = 512; 224x224 becomes 7x7, 28x28 and 32x32
    become 1x1."""
    from torchvision.models import ResNet18_Weights
    from torchvision.models import resnet18 as build

    net = build(weights=None)
    if pretrained:
        _load(net, _source(pretrained, ResNet18_Weights.IMAGENET1K_V1))
        net.conv1 = _for_channels(net.conv1, in_channels)
    elif in_channels != 3:
        net.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(
        net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3, net.layer4
    )


def with_group_norm(net: nn.Module) -> None:
    """Make every batch norm in a network a group norm: 32 groups, or fewer so that each has four channels.

    Source: Wu and He 2018, "Group Normalization"; Hsieh et al. 2020, "The Non-IID Data Quagmire of
        Decentralized Machine Learning".
    """
    for name, part in net.named_children():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            setattr(net, name, nn.GroupNorm(math.gcd(32, max(part.num_features // 4, 1)), part.num_features))
        else:
            with_group_norm(part)


# --- pretrained weights -----------------------------------------------------------------------------------


def _source(pretrained: bool | str, weights: Any) -> Path:
    """The file that the user named, or torchvision's own one."""
    if isinstance(pretrained, str):
        path = Path(pretrained)
        if not path.is_file():
            raise UserError(f"key 'model.pretrained': there is no file {pretrained}")
        return path
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
    if not path.is_file():
        raise UserError(
            f"key 'model.pretrained': uefl downloads nothing; fetch {weights.url} to {path}, or name a file"
            " of weights"
        )
    return path


def _load(net: nn.Module, path: Path) -> None:
    """A file of torchvision's layout into ``net``; its classifier may be missing, or of other classes."""
    try:
        # torchvision's format; no object but tensors is built
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of what kind depends on the bytes of the file
        raise UserError(
            f"{path} holds no weights that torch.load(weights_only=True) reads: {str(error).splitlines()[0]}"
        ) from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: expected a state dict, names with tensors; got {type(state).__name__}")
    wanted = {
        name: tensor
        for name, tensor in net.state_dict().items()
        if not name.startswith(("classifier.", "fc."))
    }
    for name, tensor in wanted.items():
        found = state.get(name)
        shape = list(found.shape) if isinstance(found, torch.Tensor) else "none"
        if shape != list(tensor.shape):
            raise UserError(
                f"{path}: expected weights {name!r} of shape {list(tensor.shape)}, as torchvision's; got"
                f" {shape}"
            )
    net.load_state_dict({name: state[name] for name in wanted}, strict=False)


def _for_channels(pretrained: nn.Module, in_channels: int) -> nn.Conv2d:
    """A pretrained first layer for images of three channels, or of one."""
    assert isinstance(pretrained, nn.Conv2d)
    if in_channels == 3:
        return pretrained
    if in_channels != 1:
        raise UserError(
            "key 'model.pretrained': pretrained weights are for images of 3 channels or 1, not"
            f" {in_channels}; set false"
        )
    pretrained.in_channels = 1
    pretrained.weight = nn.Parameter(pretrained.weight.detach().sum(1, keepdim=True))
    return pretrained
