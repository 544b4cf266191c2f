"""Network, draws and predictions of the algorithms with Gaussian features."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from uefl_kernels.metrics import entropy

from ..client.work import Work
from ..models.gaussian import Gaussian, GaussianNet
from ..uncertainty import Prediction, without_spread
from . import base
from .base import Algorithm, ModelSpec


class GaussianParameters(base.Parameters):
    """Parameters of Gaussian features."""

    dim: int = Field(512, ge=1, le=65_536)
    """features between encoder and head, each a Gaussian"""
    hidden_layer: bool = False
    """put the hidden layer of the usual head between the encoder and the Gaussians"""
    stochastic: bool = True
    """draw the features from their Gaussians; `false`: take the means"""


class GaussianFeatures(Algorithm):
    """Predict with samples of Gaussian features, without dropout."""

    Parameters: Any = GaussianParameters
    average_of: ClassVar[Literal["probabilities", "logits"]] = "probabilities"
    """quantity that a prediction averages"""

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """Build a network of encoder, Gaussian and linear head."""
        return GaussianNet(
            super().build_model(spec), self.parameters.dim, hidden=self.parameters.hidden_layer
        )

    def features(self, work: Work, gaussian: Gaussian, samples: int = 1) -> torch.Tensor:
        """Return samples of all images ``[samples * B, d]``, or without draws their means ``[B, d]``."""
        if not self.parameters.stochastic:
            return gaussian.mean
        device = gaussian.mean.device
        if "noise" not in work.memory:  # large enough to be drawn where it is needed
            seed = int(torch.randint(2**62, (), generator=work.generator))
            work.memory["noise"] = torch.Generator(device).manual_seed(seed)
        noise = torch.randn(samples, *gaussian.mean.shape, generator=work.memory["noise"], device=device)
        return gaussian.sample(noise).flatten(0, 1)

    def predict(self, work: Work, images: torch.Tensor) -> Prediction:
        """Predict over ``work.passes`` samples of the features, or without draws from their means."""
        net = gaussian_net(work)
        with work.amp():
            gaussian = net.distribution(images)
            plain = net.head(gaussian.mean).float()
            if not (self.parameters.stochastic and work.passes):
                return without_spread(plain.softmax(1))
            drawn = torch.stack(
                [
                    net.head(gaussian.sample(torch.randn_like(gaussian.mean))).float()
                    for _ in range(work.passes)
                ]
            )
        each = drawn.softmax(-1)
        mean = each.mean(0) if self.average_of == "probabilities" else drawn.mean(0).softmax(-1)
        return Prediction(mean, entropy(mean), entropy(each).mean(0), entropy(plain.softmax(1)))


def gaussian_net(work: Work) -> GaussianNet:
    """Return the network of a turn, or raise if it is not a GaussianNet."""
    assert isinstance(work.net, GaussianNet)
    return work.net
