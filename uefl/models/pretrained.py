"""Pretrained weights of torchvision's networks.

``pretrained`` is True for the ImageNet weights in torchvision's cache, or a file of weights for the same
network. Nothing is downloaded. A gray image is convolved with the sum over the three channels of the
pretrained first layer, which equals the convolution of its three equal channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UserError, first_line
from ..paths import check_file, expanded


def file_of(pretrained: bool | str, weights: Any) -> Path:
    """Return the file that the user named, or the one in torchvision's cache.

    Raises:
        UserError: the file does not exist.
    """
    if isinstance(pretrained, str):
        path = expanded(pretrained)
        check_file(path, "key 'model.pretrained':", "expected a file of weights")
        return path
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
    if not path.is_file():
        raise UserError(
            f"key 'model.pretrained': uefl downloads nothing; fetch {weights.url} to {path}, or name a file"
            " of weights"
        )
    return path


def load(net: nn.Module, path: Path) -> None:
    """Load a file of torchvision's layout, whatever its classifier is, into a network.

    Raises:
        UserError: the file cannot be read, or lacks a weight of the network.
    """
    try:
        # the format of torchvision; this creates only tensors
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise any error
        raise UserError(
            f"{path} holds no weights that torch.load(weights_only=True) reads: {first_line(error)}"
        ) from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: expected a state dict, names with tensors; got {type(state).__name__}")
    classifier, weights = ("classifier.", "fc."), net.state_dict()
    wanted = {name: tensor for name, tensor in weights.items() if not name.startswith(classifier)}
    for name, tensor in wanted.items():
        found = state.get(name)
        shape = list(found.shape) if isinstance(found, torch.Tensor) else "none"
        if shape != list(tensor.shape):
            raise UserError(
                f"{path}: expected weights {name!r} of shape {list(tensor.shape)}, as torchvision's; got"
                f" {shape}"
            )
    net.load_state_dict({name: state[name] for name in wanted}, strict=False)


def for_channels(pretrained: nn.Module, in_channels: int) -> nn.Conv2d:
    """Return a pretrained first layer for images of three channels, or of one.

    Raises:
        UserError: the images have another number of channels.
    """
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
