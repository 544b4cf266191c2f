"""FedCR: a shared encoder of Gaussian features, and a private head.

A global Gaussian of every class attracts the features of this class.

Source: Zhang et al., "FedCR: Personalized Federated Learning Based on Across-Client Common Representation
with Conditional Mutual Information Regularization" (ICML 2023), with the formulas of its published code. L =
mean over S samples of CE + beta mean sum_d KL(N(m_y, s_y^2) || N(mu, sigma^2)). The server makes N(m_c,
s_c^2) as the product of N(0, 1) and of the Gaussians that the clients' images of class c had in the last
epoch of their training: precisions add up.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import nn

from ..aggregation import Mean
from ..client.training import fit
from ..client.work import Batch, Work
from ..engines.base import Expected, Message, Reply
from ..models.gaussian import Gaussian
from ..server.turn import Turn
from .base import State, register
from .gaussian_features import GaussianFeatures, GaussianParameters, gaussian_net

_FARTHEST = 1e3  # mean of a feature
_SUMS = ("precision", "weighted_mean")


@register("fedcr")
class FedCR(GaussianFeatures):
    """FedPer with Gaussian features, and a loss that pulls them towards the Gaussian of their class."""

    average_of = "logits"
    asks_all = True  # all clients send the Gaussians of their classes

    class Parameters(GaussianParameters):
        """Parameters of FedCR."""

        hidden_layer: bool = True
        """put the hidden layer of the usual head between the encoder and the Gaussians"""
        beta: float = Field(1e-4, ge=0)
        """weight of the divergence between the Gaussians of an image and of its class"""
        rate: float = Field(1.0, ge=0, le=1)
        """share of the new product in the Gaussians of the classes; 0: these Gaussians stay N(0, 1), as in
        VIB"""
        samples: int = Field(18, ge=1, le=100_000)
        """samples of the features of an image, in a training step"""
        head_epochs: int = Field(10, ge=0, le=100_000)
        """epochs after the last round, in which every client trains only its head; 0: none"""
        gradient_bound: float = Field(10.0, ge=0)
        """largest L2 norm of the gradient of a step; a longer gradient is clipped; 0: no limit"""

        @model_validator(mode="after")
        def _diverges(self) -> Any:
            if self.beta > 0 and not self.stochastic:
                raise ValueError(
                    "beta: the divergence is infinite without draws; set 0, or stochastic = true"
                )
            return self

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Keep the head private to its client."""
        return name.startswith("head.")

    # --- the Gaussians of the classes ----------------------------------------------------------------------

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: nn.Module) -> State:
        """Return the state of FedAvg and the Gaussians ``classes [2, classes, d]``, initially N(0, 1)."""
        state = super().server_state(values, buffers, net)
        if self.parameters.beta > 0:
            means = torch.zeros(len(self.context.classes), self.parameters.dim)
            state.tensors["classes"] = torch.stack([means, means + 1])
        return state

    def prepare(self, state: State, turn: Turn) -> None:
        """Let all clients train their heads before the last measurement."""
        if turn.train or self.parameters.head_epochs == 0 or self.rounds(turn.iteration + 1) is not None:
            return
        messages = {
            client: super(FedCR, self).broadcast(state, client, turn) for client in self.context.clients
        }
        for message in messages.values():
            message.expects = {}
        for _ in turn.ask(messages):
            pass  # a head is private: the framework keeps it

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """Send the Gaussians also to each client that trains, and expect the sums over its own."""
        message = super().broadcast(state, client, turn)
        if "classes" in state.tensors and turn.train:
            classes = message.tensors["classes"] = state.tensors["classes"]
            message.expects |= {name: Expected(tuple(classes.shape[1:]), torch.float32) for name in _SUMS}
        return message

    def rejection(self, message: Message, reply: Reply) -> str | None:
        """Reject precisions that are negative, and means so large that the loss of others would overflow."""
        if not set(_SUMS) <= reply.tensors.keys():
            return None
        precision, weighted = (reply.tensors[name].double() for name in _SUMS)
        if bool((precision < 0).any()):
            return "precision has negative elements"
        far = bool((weighted.abs() > _FARTHEST * precision).any())
        return f"weighted_mean is more than {_FARTHEST:g} times its precision" if far else None

    def averages(self, state: State) -> dict[str, Mean]:
        """Return the averages of FedAvg, and the product of the Gaussians."""
        classes = state.tensors.get("classes")
        return super().averages(state) | (
            {} if classes is None else {"classes": ProductOfExperts(classes, self.parameters.rate)}
        )

    def add(self, state: State, averages: dict[str, Mean], update: Reply) -> None:
        """Add the model to its average, and the sums over the Gaussians to their product."""
        super().add(state, {name: mean for name, mean in averages.items() if name != "classes"}, update)
        if "classes" in averages:
            averages["classes"].add(*(update.tensors[name] for name in _SUMS))

    # --- the client's half ---------------------------------------------------------------------------------

    def before_round(self, work: Work) -> None:
        """Begin the sums over the Gaussians with zero."""
        if self.parameters.beta > 0:
            shape = work.message.tensors["classes"].shape
            work.memory["sums"] = torch.zeros(shape, dtype=torch.float64, device=work.workspace.device)

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy over the samples plus the divergence."""
        p, net = self.parameters, gaussian_net(work)
        with work.amp():
            gaussian = net.distribution(batch.images)
            logits = net.head(self.features(work, gaussian, p.samples))
        loss = work.cross_entropy(logits, repeated(batch.labels, logits))
        if p.beta > 0:
            means, stds = work.message.tensors["classes"]
            loss = loss + p.beta * divergence(Gaussian(means[batch.labels], stds[batch.labels]), gaussian)
            if work.epoch == work.epochs - 1:
                work.memory["sums"] += sums(gaussian, batch.labels, len(means))
        return loss

    def reply(self, work: Work) -> dict[str, torch.Tensor]:
        """Train the head, and send nothing to the server."""
        fit(self, work, loss=self._head_loss, epochs=self.parameters.head_epochs)
        work.private |= work.workspace.private()
        return {}

    def _head_loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy over the samples of the encoder in evaluation mode."""
        net = gaussian_net(work).eval()
        with work.amp():
            with torch.no_grad():
                features = self.features(work, net.distribution(batch.images), self.parameters.samples)
            logits = net.head(features)
        return nn.functional.cross_entropy(logits.float(), repeated(batch.labels, logits))

    def weight_decay(self, work: Work) -> float:
        """Return 0 while only the head is trained: the encoder has no gradient then and must not move."""
        return 0.0 if "ask" in work.message.options else super().weight_decay(work)

    def before_step(self, work: Work, gradient: torch.Tensor) -> None:
        """Shorten a gradient that is too long."""
        if self.parameters.gradient_bound > 0:
            gradient.mul_((self.parameters.gradient_bound / gradient.norm().clamp_min(1e-12)).clamp_max(1))

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the update of FedAvg, and the sums over the Gaussians."""
        return super().update(work) | (
            dict(zip(_SUMS, work.memory["sums"].float(), strict=True)) if self.parameters.beta > 0 else {}
        )


def repeated(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Repeat labels ``[B]`` to match logits ``[samples * B, classes]``."""
    return labels.repeat(len(logits) // len(labels))


def divergence(of_class: Gaussian, gaussian: Gaussian) -> torch.Tensor:
    """Return the mean over B images of KL(N(m, s^2) || N(mu, sigma^2)) in nats, class Gaussian first.

    Equivalent to::

        torch.distributions.kl_divergence(Normal(m, s), Normal(mu, sigma)).sum(1).mean()
    """
    ratio = (of_class.std / gaussian.std).square()
    each = (
        -0.5 * ratio.log() + 0.5 * (ratio + ((gaussian.mean - of_class.mean) / gaussian.std).square()) - 0.5
    )
    return each.sum(1).mean()


@torch.no_grad()
def sums(gaussian: Gaussian, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return sums of 1 / sigma^2 and mu / sigma^2 over the images of a class, ``[2, classes, d]`` float64."""
    # a matrix product sums in the same order on every device
    of_class = nn.functional.one_hot(labels, classes).double().T
    precision = gaussian.std.double().square().reciprocal()
    return torch.stack([of_class @ precision, of_class @ (precision * gaussian.mean.double())])


class ProductOfExperts:
    """Multiply, for a class with images, N(0, 1) and the Gaussians of all clients' images of the class.

    Args:
        old: ``[2, classes, d]``, means and deviations before the round.
        rate: share of the product in the result, the rest is ``old``.
    """

    def __init__(self, old: torch.Tensor, rate: float) -> None:
        self._old, self._rate = old, rate
        self._precision, self._weighted = torch.zeros_like(old, dtype=torch.float64)

    def add(self, precision: torch.Tensor, weighted: torch.Tensor) -> None:
        """Add a client's sums ``[classes, d]`` of 1 / sigma^2 and of mu / sigma^2 over its images."""
        self._precision += precision.double()
        self._weighted += weighted.double()

    def result(self) -> torch.Tensor:
        """Return the product of the Gaussians, ``[2, classes, d]`` float32."""
        precision = 1 + self._precision
        new = torch.stack([self._weighted / precision, precision.rsqrt()])
        seen = (self._precision > 0).any(1)[:, None]
        return torch.where(seen, torch.lerp(self._old.double(), new, self._rate), self._old.double()).float()
