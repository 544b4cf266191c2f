"""FedGate: each client has its own last layer, with a weight that the client's holdout images decide.

FedPer replaces the shared last layer of a client by the client's own layer. This helps if the images or the
class shares of clients differ. It harms if they do not differ, because only one client trains the own layer.
FedGate keeps both layers, and trains both on the same features. A prediction mixes the probabilities of both.
At the start of a round, each client measures both layers on its holdout images, and takes the weight between
0 and 1 under which the labels of these images are most likely. With ``gate = "entropy"`` it takes the weight
under which its predictions are least uncertain, which needs no labels. The entropy of a mixture is a concave
function of the weight, so this weight is 0 or 1.

The messages are the same as with FedAvg. The own layer and its weight stay with the client. A client that
never trained is measured with the means of the own layers and of their weights.

Source: this project. Guo et al., "PFL-MoE: Personalized Federated Learning Based on Mixture of Experts"
    (2021), also mix a shared and a personal model. There, a trained network computes the weight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional as F

from ..client.work import Batch, Work
from ..data.federation import Federation, LabeledData
from ..models.layers import check_last, layers
from . import base
from .base import Algorithm, ModelSpec, register

_WEIGHTS = torch.linspace(0, 1, 11, dtype=torch.float64)
_BATCH = 500


class GatedLayer(nn.Module):
    """A linear layer of all clients and one of a client, for the log of the mixed probabilities.

    Args:
        shared: the layer from features ``[..., D]`` to logits ``[..., classes]``; ``own`` starts as its copy.
    """

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared, self.own = shared, copy.deepcopy(shared)
        self.weight = nn.Buffer(torch.zeros(()))
        """share of the own layer, from 0 to 1"""
        self.apart = False
        """True: ``forward`` returns the logits of both layers, ``[2, ..., classes]``"""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the log of the mixed probabilities, or both logits."""
        shared, own = self.shared(features).float(), self.own(features).float()
        if self.apart:
            return torch.stack([shared, own])
        mixed = (1 - self.weight).log() + shared.log_softmax(-1), self.weight.log() + own.log_softmax(-1)
        return torch.logaddexp(*mixed)


class GatedNet(nn.Module):
    """A network with a :class:`GatedLayer` instead of its last linear layer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        (last,) = layers(net, "last", "algorithm")
        assert isinstance(last, nn.Linear)
        place = next(name for name, module in net.named_modules() if module is last)
        net.set_submodule(place, GatedLayer(last))
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the output of the gated layer for images ``[B, C, H, W]``."""
        output: torch.Tensor = self.net(images)
        return output

    @property
    def gate(self) -> GatedLayer:
        """Return the gated layer."""
        return next(module for module in self.net.modules() if isinstance(module, GatedLayer))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Return the logits of both layers, ``[2, B, classes]``, inside of the context."""
        gate = self.gate
        gate.apart = True
        try:
            yield
        finally:
            gate.apart = False


@register("fedgate")
class FedGate(Algorithm):
    """FedAvg with a shared and an own last layer, weighted by the client's holdout images."""

    class Parameters(base.Parameters):
        """Parameters of FedGate."""

        gate: Literal["likelihood", "entropy"] = "likelihood"
        """the weight of the own layer gives holdout images the largest likelihood of their labels
        (`likelihood`), or the least mean entropy of the mixed probabilities (`entropy`, without labels)"""

    columns: ClassVar[dict[str, str]] = {"own_share": "weight of the client's own last layer, from 0 to 1"}
    static_step = True
    only_the_model = False  # the own layers are not part of the mean

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """Build the usual network with a gated last layer."""
        return GatedNet(super().build_model(spec))

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Return True for the own layer and for its weight."""
        return isinstance(owner, GatedLayer) or name.rpartition(".")[0].endswith(".own")

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse a network that changes the output of its last linear layer.

        The operation would get the logits of both layers, or the log of the mixed probabilities.
        """
        super().check(federation, arm, net)
        assert isinstance(net, GatedNet)
        with net.train().apart():
            check_last(net, net.gate, base.probe(2, federation, net), arm)

    @torch.no_grad()
    def before_round(self, work: Work) -> None:
        """Choose the weight of the own layer, of eleven weights, by the holdout images."""
        net, data = _net(work), work.data
        assert isinstance(data, LabeledData)
        training, weights = net.training, _WEIGHTS.to(net.gate.weight.device)
        scores = torch.zeros_like(weights)
        with net.eval().apart():
            for images, labels in zip(
                data.holdout.images.split(_BATCH), data.holdout.labels.split(_BATCH), strict=True
            ):
                shared, own = work.logits(work.workspace.normalize(images)).double().softmax(-1)
                mixed = (1 - weights)[:, None, None] * shared + weights[:, None, None] * own
                if self.parameters.gate == "entropy":
                    scores -= torch.special.entr(mixed).sum((1, 2))
                else:
                    scores += mixed[:, torch.arange(len(labels)), labels].log().sum(1)
        net.train(training)
        net.gate.weight.fill_(weights[scores.argmax()])
        work.metrics["own_share"] = float(net.gate.weight)

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the mean of the cross-entropies of both layers."""
        with _net(work).apart():
            shared, own = work.logits(batch.images)
        return (work.cross_entropy(shared, batch.labels) + F.cross_entropy(own, batch.labels)) / 2


def _net(work: Work) -> GatedNet:
    assert isinstance(work.net, GatedNet)
    return work.net
