"""FedSR: a simple representation.

The loss pulls samples of Gaussian features to a small norm, and to a Gaussian of their class.

Source: Nguyen, Torr and Lim, "FedSR: A Simple and Effective Domain Generalization Method for Federated
Learning" (NeurIPS 2022), with the formulas of its published code. L = CE + a mean |z|_2 + c mean sum_d KL.
KL is the Kullback-Leibler divergence from N(q mu, (q sigma)^2) to the Gaussian N(m_y, rho_y^2) of the class.
This Gaussian and the number q are trained with the network.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from ..aggregation import Mean, WeightedMean
from ..client.work import Batch, Work
from ..engines.base import Message, expected_like
from ..models.gaussian import Gaussian
from ..server.turn import Turn
from .base import State, register
from .gaussian_features import GaussianFeatures, GaussianParameters, gaussian_net

_ONE = 0.5413248546129181  # softplus of this number is 1


@register("fedsr")
class FedSR(GaussianFeatures):
    """FedAvg with Gaussian features and two further loss terms.

    Without these terms and without draws it is FedAvg of the same layers, bit for bit.
    """

    class Parameters(GaussianParameters):
        """Parameters of FedSR."""

        norm_weight: float = Field(0.01, ge=0)
        """weight of the mean norm of the drawn features"""
        norm: Literal["l2", "l2sq"] = "l2"
        """`l2`: the norm, as in the published code; `l2sq`: its square, as derived in the paper"""
        divergence_weight: float = Field(1e-3, ge=0)
        """weight of the divergence between the Gaussians of an image and of its class"""
        class_gaussians: Literal["local", "shared"] = "local"
        """the Gaussians of the classes stay with each client, as published (`local`), or are averaged
        (`shared`)"""

        @model_validator(mode="after")
        def _diverges(self) -> Any:
            if self.divergence_weight > 0 and not self.stochastic:
                raise ValueError(
                    "divergence_weight: the divergence is infinite without draws; set 0 (the "
                    "variant FedL2R), or stochastic = true"
                )
            return self

    # --- the Gaussians of the classes ----------------------------------------------------------------------

    def _class_gaussians(self, scope: str) -> dict[str, torch.Tensor]:
        """Return ``class_mean``, ``class_std`` ``[classes, d]`` and ``scale`` (q).

        The last two are given before softplus. Return nothing for the other scope.
        """
        if self.parameters.divergence_weight == 0 or self.parameters.class_gaussians != scope:
            return {}
        shape = (len(self.context.classes), self.parameters.dim)
        return {"class_mean": torch.zeros(shape), "class_std": torch.ones(shape), "scale": torch.tensor(_ONE)}

    def client_state(self, client: str) -> dict[str, torch.Tensor]:
        """Return the Gaussians of the classes if each client keeps its own."""
        return self._class_gaussians("local")

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: nn.Module) -> State:
        """Return the state of FedAvg, and the Gaussians of the classes if all clients share them."""
        state = super().server_state(values, buffers, net)
        state.tensors |= self._class_gaussians("shared")
        return state

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """Return the message of FedAvg, with the shared Gaussians."""
        message = super().broadcast(state, client, turn)
        shared = {name: state.tensors[name] for name in self._class_gaussians("shared")}
        message.tensors |= shared
        message.expects |= expected_like(shared)
        return message

    def averages(self, state: State) -> dict[str, Mean]:
        """Return the averages of FedAvg and of the shared Gaussians."""
        return super().averages(state) | {
            name: WeightedMean(state.tensors[name]) for name in self._class_gaussians("shared")
        }

    # --- the client's half ---------------------------------------------------------------------------------

    def before_round(self, work: Work) -> None:
        """Train the Gaussians of the classes together with the network."""
        found = {name: work.private[name] for name in self._class_gaussians("local")}
        found |= {name: work.message.tensors[name] for name in self._class_gaussians("shared")}
        work.trained = {name: tensor.detach().clone().requires_grad_() for name, tensor in found.items()}

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy plus the two terms."""
        p, net = self.parameters, gaussian_net(work)
        with work.amp():
            gaussian = net.distribution(batch.images)
            features = self.features(work, gaussian)
            logits = net.head(features)
        loss = work.cross_entropy(logits, batch.labels)
        if p.norm_weight > 0:
            norms = features.norm(dim=1) if p.norm == "l2" else features.square().sum(1)
            loss = loss + p.norm_weight * norms.mean()
        if p.divergence_weight > 0:
            mean = work.trained["class_mean"][batch.labels]
            std = nn.functional.softplus(work.trained["class_std"][batch.labels])
            scale = nn.functional.softplus(work.trained["scale"])
            loss = loss + p.divergence_weight * divergence(gaussian, mean, std, scale)
        return loss

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Send the Gaussians of the classes to the server, or keep them."""
        trained = {name: tensor.detach() for name, tensor in work.trained.items()}
        if self.parameters.class_gaussians == "shared":
            return super().update(work) | trained
        work.private |= trained
        return super().update(work)


def divergence(
    gaussian: Gaussian, mean: torch.Tensor, std: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the mean over B images of KL(N(q mu, (q sigma)^2) || N(m, rho^2)), in nats.

    Args:
        gaussian: mu and sigma, ``[B, d]``.
        mean, std: m and rho ``[B, d]``, of the class of each image.
        scale: q, a positive scalar.

    Equivalent to::

        torch.distributions.kl_divergence(Normal(q * mu, q * sigma), Normal(m, rho)).sum(1).mean()
    """
    mine = Gaussian(scale * gaussian.mean, scale * gaussian.std)
    each = (
        std.log()
        - mine.std.log()
        + (mine.std.square() + (mine.mean - mean).square()) / (2 * std.square())
        - 0.5
    )
    return each.sum(1).mean()
