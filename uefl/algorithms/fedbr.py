"""FedBR: train on pseudo-images, with uniform predictions and features unlike the features of real images.

Source: Guo et al., "FedBR: Improving Federated Learning on Heterogeneous Data via Local Learning Bias
Reduction" (ICML 2023), and the authors' code, with random sample means as pseudo-images. A projection head,
averaged with the model, maximizes the contrast that the features minimize.

A training message has ``pseudo [m, C, H, W]``, on the scale 0-255, and ``projection [Q]``; the client returns
``projection``. The reply to the first exchange has ``pseudo [n, C, H, W]``, means of the client's images.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, softplus

from ..aggregation import Mean, WeightedMean
from ..client.work import Batch, Work
from ..data.federation import Federation
from ..engines.base import Expected, Message, Reply, expected_like
from ..errors import UserError
from ..models.flat import FlatModule
from ..models.layers import BatchStatistics
from ..models.net import usual
from ..server.turn import Turn
from . import base
from .base import Algorithm, State, register

_MIXED = 10  # images in a mean
# images of a client for each of its means: with fewer images, the means could determine an image
_SHARE = 50


@register("fedbr")
class FedBR(Algorithm):
    """FedAvg with loss terms on pseudo-images, and FedAvg bit for bit with ``contrast = uniform = 0``."""

    images_only: ClassVar[str] = "sends means of images"
    asks_all = True  # all clients make their mean images before the first round

    class Parameters(base.Parameters):
        """Parameters of FedBR."""

        contrast: float = Field(0.5, ge=0)
        """mu, weight of the contrast between features of pseudo-images and of the client's images"""
        uniform: float = Field(1.0, ge=0)
        """lambda, weight of the cross-entropy of pseudo-images with a uniform prediction"""
        pseudo: int = Field(32, ge=2, le=10_000)
        """largest number of pseudo-images; each client makes one pseudo-image for every 50 of its images"""
        pull: float = Field(2.0, ge=0)
        """tau 1, factor of the similarity to the received model, on pseudo-images"""
        push: float = Field(2.0, ge=0)
        """tau 2, factor of the similarity between pseudo-images and the client's images"""
        projection: Literal["paper", "code"] = "paper"
        """layers of the projection head on n features: `paper`: n-256-256-128; `code`: n-2n-2n-n"""
        projection_lr: float = Field(0.01, gt=0)
        """learning rate of the projection head, which has its own plain SGD"""

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse a network without the usual head, which has the features."""
        usual(net, f"arm {arm!r}: the features of fedbr need")
        super().check(federation, arm, net)
        if self._on and not any(most_means(client.sizes.train) for client in federation.clients):
            raise UserError(
                f"arm {arm!r}: fedbr needs a client with {2 * _MIXED} training images or more, to make means"
                " of ten"
            )

    @property
    def _on(self) -> bool:
        return bool(self.parameters.contrast or self.parameters.uniform)

    # --- the server's half ---------------------------------------------------------------------------------

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: nn.Module) -> State:
        """Return the state of FedAvg and the projection head."""
        state = super().server_state(values, buffers, net)
        if self._on:
            state.tensors["projection"] = FlatModule(self.projector(net)).values.detach()
        return state

    def prepare(self, state: State, turn: Turn) -> None:
        """Ask randomly drawn clients for the pseudo-images, once, before the first round."""
        if not self._on or "pseudo" in state.tensors:
            return
        clients = self.context.clients
        places = torch.tensor([most_means(self.context.examples[client]) for client in clients])
        owners = torch.arange(len(clients)).repeat_interleave(places)
        chosen = owners[torch.randperm(len(owners))[: self.parameters.pseudo]]
        counts = torch.bincount(chosen, minlength=len(clients)).tolist()
        messages = {}
        for client, count in zip(clients, counts, strict=True):
            if count:
                messages[client] = super().broadcast(state, client, turn)
                messages[client].options["pseudo"] = count
                messages[client].expects = {"pseudo": Expected((count, *self.context.shape), torch.float32)}
        made = [reply.tensors["pseudo"].clone() for reply in turn.need(messages, "make pseudo-images")]
        state.tensors["pseudo"] = torch.cat(made).to(state.tensors["values"].device)

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """Return the message of FedAvg, in training with the pseudo-images and the projection head."""
        message = super().broadcast(state, client, turn)
        if self._on and turn.train:
            message.tensors["projection"] = state.tensors["projection"]
            message.expects = expected_like(message.tensors)
            message.tensors["pseudo"] = state.tensors["pseudo"]
        return message

    def rejection(self, message: Message, reply: Reply) -> str | None:
        """Reject pseudo-images with values that no mean of images has."""
        pseudo = reply.tensors.get("pseudo")
        if pseudo is None or (float(pseudo.min()) >= 0 and float(pseudo.max()) <= 255):
            return None
        return "pseudo has values outside of 0 to 255"

    def averages(self, state: State) -> dict[str, Mean]:
        """Return the averages of FedAvg and of the projection head."""
        own: dict[str, Mean] = {"projection": WeightedMean(state.tensors["projection"])} if self._on else {}
        return super().averages(state) | own

    # --- the client's half ---------------------------------------------------------------------------------

    def reply(self, work: Work) -> dict[str, torch.Tensor]:
        """Make pseudo-images, means of ten images each, without labels.

        No image is in two means. Only the owner of the client's secret can repeat the selection, and the same
        images give the same means in every request.

        Raises:
            UserError: the server asks for more means than the client may make.
        """
        images = work.train.images
        count, most = int(work.message.options["pseudo"]), most_means(len(images))
        if not 0 < count <= most:
            raise UserError(
                f"the server asks for {count} means of images; a client with {len(images)} makes at most"
                f" {most}"
            )
        order = work.own_draws(len(images), "pseudo", of=images).argsort()
        chosen = order[: _MIXED * count].view(count, _MIXED)
        return {"pseudo": images[chosen.to(images.device)].float().mean(1)}

    def before_round(self, work: Work) -> None:
        """Load the projection head and compute the received model's features of the pseudo-images."""
        if not self._on:
            return
        projector = self.projector(work.net).to(work.workspace.device)
        flat = FlatModule(projector)
        flat.values.data.copy_(work.message.tensors["projection"])
        optimizer = torch.optim.SGD([flat.values], lr=self.parameters.projection_lr)
        pseudo = work.workspace.normalize(work.message.tensors["pseudo"])
        work.memory |= {
            "pseudo": pseudo,
            "projector": projector,
            "projection": flat.values,
            "optimizer": optimizer,
        }
        with torch.no_grad():
            work.memory["received"] = self.of_pseudo(work)[0]

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Take a step of the projection head, then return the three loss terms."""
        if not self._on:
            return super().loss(work, batch)
        p, pairs = self.parameters, min(len(batch.labels), len(work.memory["pseudo"]))
        pseudo, pseudo_logits = self.of_pseudo(work)
        with work.amp():
            own, logits = _both(work.net, batch.images)
        features = (pseudo[:pairs], own[:pairs].float(), work.memory["received"][:pairs])
        if p.contrast:
            self.ascend(work, features)
        uniform = torch.full_like(pseudo_logits, 1 / pseudo_logits.shape[1])
        total: torch.Tensor = work.cross_entropy(logits, batch.labels) + p.uniform * cross_entropy(
            pseudo_logits, uniform
        )
        if p.contrast:
            total = total + p.contrast * self.contrast_of(work, features)
        return total

    def ascend(self, work: Work, features: tuple[torch.Tensor, ...]) -> None:
        """Take a step of the projection head, and leave the network as it is."""
        projection, optimizer = work.memory["projection"], work.memory["optimizer"]
        projection.grad.zero_()
        (-self.contrast_of(work, tuple(each.detach() for each in features))).backward()
        optimizer.step()

    def contrast_of(self, work: Work, features: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the contrast of three features ``[m, n]``: pseudo, own, and pseudo by the received model."""
        return contrast(
            *map(work.memory["projector"], features), pull=self.parameters.pull, push=self.parameters.push
        )

    def of_pseudo(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features and logits of the pseudo-images, without dropout, with batch statistics.

        Predictions use the running statistics. If the loss on pseudo-images used them too, it would also
        make the predictions for real images more uniform. The pseudo-images do not change the running
        statistics.
        """
        training = work.net.training
        work.net.eval()
        with work.amp(), BatchStatistics(work.net):
            features, logits = _both(work.net, work.memory["pseudo"])
        work.net.train(training)
        return features.float(), logits.float()

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the update of FedAvg and the projection head."""
        own = {"projection": work.memory["projection"].detach()} if self._on else {}
        return super().update(work) | own

    def projector(self, net: nn.Module) -> nn.Sequential:
        """Build a projection head for this network, with drawn weights."""
        _, head = usual(net, "the features of fedbr need")
        n = head.fc2.in_features
        hidden, outputs = (256, 128) if self.parameters.projection == "paper" else (2 * n, n)
        return nn.Sequential(
            nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        )


def most_means(images: int) -> int:
    """Return the largest number of pseudo-images: one for 50 images, rounded up, and none below 20."""
    return -(-images // _SHARE) if images >= 2 * _MIXED else 0


def contrast(
    pseudo: torch.Tensor, own: torch.Tensor, received: torch.Tensor, *, pull: float, push: float
) -> torch.Tensor:
    """Return the mean of ln(1 + exp(push cos(pseudo, own) - pull cos(pseudo, received))) over ``[m, n]``."""
    return softplus(push * cosine_similarity(pseudo, own) - pull * cosine_similarity(pseudo, received)).mean()


def _both(net: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features ``[B, hidden]`` and logits ``[B, classes]``."""
    net, head = usual(net, "the features of fedbr need")
    features = head.prefix(net.tokens(images))
    return features, head.stochastic(features)
