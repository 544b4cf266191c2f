"""The network of the algorithms: an encoder and a head, with or without a codebook between them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..data.inputs import IMAGES, Inputs
from ..errors import UserError
from .heads import Head
from .networks.base import NETWORKS, find, quoted, with_usual_head

if TYPE_CHECKING:
    from ..config import Model


def with_group_norm(net: nn.Module) -> None:
    """Make every batch norm in a network a group norm: 32 groups, or fewer so that each has four channels.

    Source: Wu and He 2018, "Group Normalization"; Hsieh et al. 2020, "The Non-IID Data Quagmire of
        Decentralized Machine Learning".
    """
    for name, module in net.named_children():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            channels = module.num_features
            setattr(net, name, nn.GroupNorm(math.gcd(32, max(channels // 4, 1)), channels))
        else:
            with_group_norm(module)


class TokenNet(nn.Module):
    """A network in two parts, for a quantizer between them.

    Attributes:
        head: from tokens to logits ``[B, classes]``.
        dim: D, elements of a token.
        positions: tokens of an image.
    """

    head: nn.Module
    dim: int
    positions: int

    def tokens(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images [B, C, H, W], normalized -> tokens [B, ..., D]."""
        raise NotImplementedError

    def classify(self, tokens: torch.Tensor) -> torch.Tensor:
        """Classify tokens, quantized or not -> logits [B, classes]."""
        logits: torch.Tensor = self.head(tokens)
        return logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, classes]."""
        return self.classify(self.tokens(images))


def as_tokens(features: torch.Tensor, pooled: bool) -> torch.Tensor:
    """Reshape an encoder's map [B, D, H', W'] to tokens [B, H', W', D], or to their mean [B, 1, 1, D]."""
    return (features.mean((2, 3), keepdim=True) if pooled else features).permute(0, 2, 3, 1)


class Net(TokenNet):
    """Encoder and head.

    The codebook is not a parameter of the network, because each client sees a codebook of its own.

    Args:
        shape: (C, H, W).

    Attributes:
        dim: D, channels of the encoder's feature map.
        positions: positions of the feature map, H' x W', or 1 if the map is pooled.

    Raises:
        UserError: the images are too small for the encoder.
    """

    def __init__(self, model: Model, shape: tuple[int, ...], classes: int, inputs: Inputs = IMAGES) -> None:
        super().__init__()
        made = find(model.encoder)(model, shape, inputs)
        if made.inputs != inputs.kind:
            fitting = quoted(name for name in NETWORKS if NETWORKS[name].inputs == inputs.kind)
            raise UserError(
                f"key 'model.encoder': {model.encoder!r} takes {made.inputs}, and the data are {inputs.kind};"
                f" set {fitting}"
            )
        self.encoder: nn.Module = made.encoder()
        self.pooled = model.pooled
        height, width, self.dim = self._token_shape(model.encoder, shape)
        self.positions = height * width
        self.head = made.head(self.dim, self.positions, classes)
        if model.norm_layer == "group":
            with_group_norm(self)

    def tokens(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images [B, C, H, W], normalized -> tokens [B, H', W', D], or pooled [B, 1, 1, D].

        In channels-last memory this makes no copy.
        """
        return as_tokens(self.encoder(images), self.pooled)

    @torch.no_grad()
    def _token_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
        training, probe = self.encoder.training, torch.zeros(1, *shape)
        try:
            dim, height, width = self.encoder.eval()(probe).shape[1:]
        except RuntimeError:  # the map is too small for the pooling
            size = " x ".join(map(str, shape))
            raise UserError(
                f"images of {size} are too small for encoder {name!r}; set a larger image_size, or another"
                " encoder"
            ) from None
        self.encoder.train(training)
        return (1, 1, dim) if self.pooled else (height, width, dim)


def usual(net: nn.Module, who: str) -> tuple[Net, Head]:
    """Return a built-in network with the usual head, and that head, for algorithms with own features.

    Args:
        who: begins the message, e.g. "Gaussian features need".

    Raises:
        UserError: the network or its head is another one.
    """
    if not isinstance(net, Net) or not isinstance(net.head, Head):
        raise UserError(f"{who} a network with the usual head: encoder = {with_usual_head()}")
    return net, net.head
