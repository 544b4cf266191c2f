"""The network that algorithms build upon: an encoder, and a head; a codebook may stand between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import UserError
from . import encoders

if TYPE_CHECKING:
    from ..config import Model


class Head(nn.Module):
    """Linear, GELU, dropout, linear, and optionally dropout on the logits."""

    def __init__(self, inputs: int, hidden: int, classes: int, p: float, logit_dropout: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.drop = nn.Dropout(p)
        self.fc2 = nn.Linear(hidden, classes)
        self.logit_drop = nn.Dropout(p if logit_dropout else 0.0)

    def prefix(self, tokens: torch.Tensor) -> torch.Tensor:
        """The deterministic part: tokens [B, ...] -> hidden [B, hidden]."""
        return nn.functional.gelu(self.fc1(tokens.flatten(1)))

    def stochastic(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the layers from the first dropout on: hidden [B, hidden] -> logits [B, classes]."""
        logits: torch.Tensor = self.logit_drop(self.fc2(self.drop(hidden)))
        return logits


class DeepHead(nn.Module):
    """FedUL's head: linear, batch norm, ReLU and dropout to 32w, the same to 8w, then linear; the dropouts
    are off unless turned on."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for size, units in ((inputs, 32 * width), (32 * width, 8 * width)):
            blocks += [nn.Linear(size, units), nn.BatchNorm1d(units), nn.ReLU(), nn.Dropout(0.0)]
        self.hidden = nn.Sequential(*blocks)
        self.out = nn.Linear(8 * width, classes)

    def prefix(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, ...] -> [B, inputs]."""
        return tokens.flatten(1)

    def stochastic(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, inputs] -> logits [B, classes]."""
        logits: torch.Tensor = self.out(self.hidden(hidden))
        return logits


class PooledHead(nn.Module):
    """ResNet's head: the mean over positions, then linear."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, classes)

    def prefix(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, H', W', D] -> [B, D]."""
        return tokens.mean((1, 2))

    def stochastic(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, D] -> logits [B, classes]."""
        logits: torch.Tensor = self.out(hidden)
        return logits


class TokenNet(nn.Module):
    """A network in two parts, which a quantiser may stand between.

    Attributes:
        head: from tokens to logits ``[B, classes]``.
        dim: D, elements of a token.
        positions: tokens of an image.
    """

    head: nn.Module
    dim: int
    positions: int

    def tokens(self, images: torch.Tensor) -> torch.Tensor:
        """images [B, C, H, W], normalised -> tokens [B, ..., D]."""
        raise NotImplementedError

    def classify(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, quantised or not -> logits [B, classes]."""
        logits: torch.Tensor = self.head(tokens)
        return logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]."""
        return self.classify(self.tokens(images))


def as_tokens(features: torch.Tensor, pooled: bool) -> torch.Tensor:
    """The map [B, D, H', W'] of an encoder as tokens [B, H', W', D], or their mean [B, 1, 1, D]."""
    return (features.mean((2, 3), keepdim=True) if pooled else features).permute(0, 2, 3, 1)


class Net(TokenNet):
    """Encoder and head; the codebook is not a parameter here, because each client sees one of its own.

    Args:
        model: the section of the configuration.
        shape: (C, H, W).
        classes: number of classes.

    Attributes:
        dim: D, channels of the encoder's feature map.
        positions: places of the feature map, H' x W', or 1 where it is pooled.

    Raises:
        UserError: the images are too small for the encoder.
    """

    def __init__(self, model: Model, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels = shape[0]
        if model.encoder == "cnn":
            self.encoder: nn.Module = encoders.small_cnn(channels, model.width)
        elif model.encoder == "cnn5x5":
            self.encoder = encoders.cnn5x5(model.width)
        else:
            self.encoder = getattr(encoders, model.encoder)(channels, model.pretrained)
        self.pooled = model.pooled
        height, width, self.dim = self._token_shape(model.encoder, shape)
        self.positions = height * width
        inputs = self.positions * self.dim
        self.head: Head | DeepHead | PooledHead
        if model.encoder == "cnn5x5":
            self.head = DeepHead(inputs, model.width, classes)
        elif model.encoder == "resnet18_nopool":
            self.head = PooledHead(self.dim, classes)
        else:
            self.head = Head(inputs, model.hidden, classes, model.dropout, model.logit_dropout)
        if model.norm_layer == "group":
            encoders.with_group_norm(self)

    def tokens(self, images: torch.Tensor) -> torch.Tensor:
        """images [B, C, H, W], normalised -> tokens [B, H', W', D], or pooled [B, 1, 1, D]; free of a copy in
        channels-last memory."""
        return as_tokens(self.encoder(images), self.pooled)

    def classify(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, H', W', D], quantised or not -> logits [B, classes]."""
        return self.head.stochastic(self.head.prefix(tokens))

    @torch.no_grad()
    def _token_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
        training, probe = self.encoder.training, torch.zeros(1, *shape)
        try:
            dim, height, width = self.encoder.eval()(probe).shape[1:]
        except RuntimeError:  # a map that pooling would leave nothing of
            size = " x ".join(map(str, shape))
            raise UserError(
                f"images of {size} are too small for encoder {name!r}; set a larger image_size, or another"
                " encoder"
            ) from None
        self.encoder.train(training)
        return (1, 1, dim) if self.pooled else (height, width, dim)


def usual(net: nn.Module, who: str) -> tuple[Net, Head]:
    """A network of the package with the usual head, and that head: what algorithms build upon that have
    features of their own.

    Args:
        net: any network.
        who: begins the message, e.g. "Gaussian features need".

    Raises:
        UserError: another network, or another head.
    """
    if not isinstance(net, Net) or not isinstance(net.head, Head):
        raise UserError(f"{who} encoder = 'cnn', 'vgg16_bn' or 'resnet18'")
    return net, net.head
