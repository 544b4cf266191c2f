"""VHL: all clients also train on the same noise images.

Features of a class move towards the noise of that class.

Source: Tang et al., "Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated
Learning" (ICML 2022), and the authors' code: one virtual class per real class. A virtual class has outputs of
its own, and its features attract the features of its real class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, cast

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, log_softmax, normalize

from ..client.work import Batch, Work
from ..data.federation import Federation, Split
from ..models.heads import Head
from ..models.net import Net, usual
from ..seeds import derive
from . import base
from .base import Algorithm, ModelSpec, register

_GRID = 8  # side of the noise that an image is made of


@register("vhl")
class VHL(Algorithm):
    """FedAvg on real and virtual images, and FedAvg bit for bit with ``virtual_batch = 0``."""

    images_only: ClassVar[str] = "makes virtual images"

    class Parameters(base.Parameters):
        """Parameters of VHL."""

        virtual_batch: int = Field(128, ge=0)
        """virtual images in a step, at most the number of real images; 0: none, as with FedAvg"""
        virtual_per_class: int = Field(200, ge=1, le=100_000)
        """virtual images of each class"""
        virtual_weight: float = Field(1.0, ge=0)
        """weight of the cross-entropy of virtual images"""
        pull: float = Field(1.0, ge=0)
        """weight of the term that pulls the features of real images towards the features of virtual images"""
        virtual_contrast: float = Field(0.1, ge=0)
        """weight of the contrast between the features of virtual images"""
        pull_epochs: int = Field(5, ge=0)
        """number of epochs of a round in which the feature terms are part of the loss"""
        temperature: float = Field(0.07, gt=0)
        """temperature of the feature terms"""

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse a network without the usual head, which has the features."""
        usual(net, f"arm {arm!r}: virtual images need")
        super().check(federation, arm, net)

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """Build the usual network, and a second last layer for the virtual classes that never predicts."""
        net = super().build_model(spec)
        if isinstance(net, Net) and isinstance(net.head, Head):
            net.head.virtual = nn.Linear(net.head.fc2.in_features, spec.classes)
        return net

    def before_round(self, work: Work) -> None:
        """Make the virtual images, which are the same at every client."""
        if self.parameters.virtual_batch:
            classes, count = len(self.context.classes), self.parameters.virtual_per_class
            images = virtual_images(derive(work.seed, "virtual"), self.context.shape, classes, count)
            work.memory["virtual"] = images.to(work.workspace.device)

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy of real and virtual images, plus the pull and the contrast of features."""
        p, real = self.parameters, len(batch.labels)
        if p.virtual_batch == 0:
            return super().loss(work, batch)
        virtual = cast(Split, work.memory["virtual"])
        chosen = torch.randint(len(virtual), (min(p.virtual_batch, real),), generator=work.generator).to(
            batch.labels.device
        )
        labels = virtual.labels[chosen]
        images = torch.cat([batch.images, work.workspace.normalize(virtual.images[chosen])])
        with work.amp():
            features, logits = _both(work.net, images)
        features, logits = features.float(), logits.float()
        own = work.cross_entropy(logits[:real], batch.labels)
        loss: torch.Tensor = own + p.virtual_weight * cross_entropy(
            logits[real:], len(self.context.classes) + labels
        )
        if work.epoch < p.pull_epochs:
            fixed = torch.cat([features[:real], features[real:].detach()])
            loss = loss + p.pull * contrast(fixed, torch.cat([batch.labels, labels]), p.temperature)
            loss = loss + p.virtual_contrast * contrast(features[real:], labels, p.temperature)
        return loss


@lru_cache(maxsize=4)
def virtual_images(seed: int, shape: tuple[int, int, int], classes: int, count: int) -> Split:
    """Generate the ``count`` images of each class for a seed, uint8 ``[classes * count, C, H, W]``.

    The mean of a class is drawn from N(0, 1) on a grid of 8 x 8, an image of it from N(mean, 0.5^2); it is
    enlarged (bilinear) and clamped to [0, 1], where 1 is white.
    """
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = shape
    means = torch.randn(classes, 1, channels, _GRID, _GRID, generator=generator)
    grids = means + 0.5 * torch.randn(classes, count, channels, _GRID, _GRID, generator=generator)
    images = interpolate(grids.flatten(0, 1), (height, width), mode="bilinear").clamp(0, 1)
    return Split((255 * images).round().to(torch.uint8), torch.arange(classes).repeat_interleave(count))


def contrast(features: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the supervised contrastive loss of features ``[B, D]`` with labels ``[B]``, a scalar in nats.

    Each row is an anchor. Its term is minus the mean log-probability of the other rows of its class, in the
    softmax over the cosines with all other rows, divided by ``temperature``; 0 without another row of the
    class.

    Source: Khosla et al. 2020, "Supervised Contrastive Learning", eq. 2.
    """
    unit = normalize(features, dim=1)
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    similar = log_softmax((unit @ unit.T / temperature).masked_fill(itself, float("-inf")), dim=1)
    alike = (labels[:, None] == labels[None]) & ~itself
    among = torch.where(alike, similar, 0).sum(1) / alike.sum(1).clamp_min(1)
    return -among.mean()


def _both(net: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features ``[B, hidden]`` and logits ``[B, 2 classes]``, real classes first."""
    net, head = usual(net, "virtual images need")
    features = head.prefix(net.tokens(images))
    dropped = head.drop(features)
    return features, head.logit_drop(
        torch.cat([head.fc2(dropped), cast(nn.Linear, head.virtual)(dropped)], dim=1)
    )
