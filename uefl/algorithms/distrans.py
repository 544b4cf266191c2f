"""DisTrans: every client mixes its own offset into its images, and trains the offset with the model.

Source: Yuan et al., "Addressing Heterogeneity in Federated Learning via Distributional Transformation" (ECCV
2022), with the formulas of its published code. For an image x and the offset t, the network sees (1 - alpha)
x + alpha t and (1 + alpha) x - alpha t, with mean x. Both mixtures pass the same encoder and hidden layer.
The last layer takes both hidden vectors.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from ..client.work import Batch, Work
from ..errors import UserError
from ..models.heads import Head
from ..models.net import Net, usual
from ..models.networks.base import with_usual_head
from . import base
from .base import Algorithm, ModelSpec, register


class TwinHead(Head):
    """The usual head with its hidden layer on two feature maps, and a last layer that takes both."""

    def __init__(self, single: Head, classes: int) -> None:
        nn.Module.__init__(self)
        self.fc1, self.activation = single.fc1, single.activation
        self.drop, self.logit_drop = single.drop, single.logit_drop
        self.fc2 = nn.Linear(2 * single.fc1.out_features, classes)

    def prefix(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute hidden units ``[B, 2 hidden]`` from tokens ``[B, 2, ...]``."""
        units: torch.Tensor = self.activation(self.fc1(tokens.flatten(2)))
        return units.flatten(1)


class TwinNet(Net):
    """Encoder and head on two mixtures of each image and ``offset [C, H, W]``, which no optimizer has.

    Raises:
        UserError: the network is not an encoder with the usual head.
    """

    offset: torch.Tensor

    def __init__(self, spec: ModelSpec, alpha: float) -> None:
        super().__init__(spec.settings, spec.shape, spec.classes, spec.inputs)
        _, head = usual(self, "DisTrans needs")
        self.head = TwinHead(head, spec.classes)
        self.alpha = alpha
        self.register_buffer("offset", torch.zeros(spec.shape))

    def tokens(self, images: torch.Tensor) -> torch.Tensor:
        """Compute tokens of both mixtures ``[B, 2, H', W', D]`` from normalized images ``[B, C, H, W]``."""
        return torch.stack(
            [super(TwinNet, self).tokens(mixture) for mixture in mixtures(images, self.offset, self.alpha)], 1
        )


@register("distrans")
class DisTrans(Algorithm):
    """FedAvg with an offset per client, private or averaged."""

    columns: ClassVar[dict[str, str]] = {
        "offset_moved": (
            "distance that a client's offset has moved in the last round of the client, relative to the"
            " length of the offset"
        )
    }

    images_only: ClassVar[str] = "mixes an offset into images"

    class Parameters(base.Parameters):
        """Parameters of DisTrans."""

        alpha: float = Field(0.2, ge=0, le=1)
        """share of the offset in an image"""
        offset_lr: float = Field(1e-3, ge=0)
        """learning rate of the offset, for plain gradient descent; 0: the offset does not change"""
        offsets: Literal["local", "mean"] = "local"
        """`local`: every client keeps its own offset, as in the published code; `mean`: the offsets are
        averaged, as in the paper"""

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """Build the configured network on two mixtures.

        Raises:
            UserError: the network was given in Python.
        """
        if spec.given is not None:
            raise UserError(f"DisTrans needs encoder = {with_usual_head()}, not a network that was given")
        return TwinNet(spec, self.parameters.alpha)

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Return True for the offset, unless offsets are averaged."""
        return name == "offset" and self.parameters.offsets == "local"

    def before_round(self, work: Work) -> None:
        """Draw the offset before the client's first training: pixels U(0, 1), normalized like the images.

        The draw needs the client's secret, so that others cannot subtract the offset.
        """
        offset = _offset(work)
        if not offset.any():
            pixels = work.own_draws(offset.numel(), "offset", work.seed).view(1, *offset.shape).to(offset)
            offset.copy_(work.workspace.normalize(255 * pixels)[0])
        work.memory["start"] = offset.clone()
        offset.requires_grad_()

    @torch.no_grad()
    def after_batch(self, work: Work, batch: Batch) -> None:
        """Take a gradient step of the offset."""
        offset = _offset(work)
        assert offset.grad is not None
        offset.sub_(offset.grad, alpha=self.parameters.offset_lr)
        offset.grad = None

    def after_round(self, work: Work) -> None:
        """Make the offset a buffer again."""
        offset = _offset(work)
        offset.requires_grad_(False)
        offset.grad = None

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the model, and measure how far the offset has moved."""
        start = work.memory["start"]
        work.metrics["offset_moved"] = float((_offset(work) - start).norm() / start.norm())
        return super().update(work)


def mixtures(images: torch.Tensor, offset: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (1 - alpha) x + alpha t and (1 + alpha) x - alpha t for x ``[B, C, H, W]``, t ``[C, H, W]``."""
    shift = alpha * (offset - images)
    return images + shift, images - shift


def _offset(work: Work) -> torch.Tensor:
    assert isinstance(work.net, TwinNet)
    return work.net.offset
