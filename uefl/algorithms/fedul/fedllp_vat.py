"""FedLLP-VAT: label proportions, and predictions that are smooth around every image.

Source: Miyato et al. 2018, "Virtual Adversarial Training"; Tsai & Lin 2020, "Learning from Label Proportions
with Consistency".
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field

from ...client.work import Batch, Work
from ...models.layers import BatchStatistics
from ..base import register
from .fedllp import FedLLP
from .sets import SetParameters

_RAMP = 20  # epochs until the smoothness term has its full weight


@register("fedllp-vat")
class FedLLPVAT(FedLLP):
    """FedLLP with a smoothness term that grows over the first 20 epochs."""

    images_only: ClassVar[str] = "moves images along a gradient"

    class Parameters(SetParameters):
        """Parameters of virtual adversarial training."""

        vat_weight: float = Field(5e-4, ge=0)
        """final weight of the smoothness term, reached within 20 epochs"""
        vat_xi: float = Field(1.0, gt=0)
        """length of the probing step"""
        vat_epsilon: float = Field(1e-2, gt=0)
        """length of the adversarial step"""
        vat_legacy_ramp: bool = False
        """restart the ramp of the weight in every epoch, as in the published code"""

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the loss of one set, plus the weighted smoothness of the predictions around its images."""
        if self.parameters.vat_weight == 0:  # FedLLP bit for bit
            return super().loss(work, batch)
        sets = len(work.sets.priors)
        step = (
            work.epoch_step
            if self.parameters.vat_legacy_ramp
            else work.round * work.epochs * sets + work.step
        )
        progress = min(1.0, step / (_RAMP * sets))
        weight = self.parameters.vat_weight * math.exp(-5 * (1 - progress) ** 2)
        total: torch.Tensor = super().loss(work, batch) + weight * self.smoothness(work, batch.images)
        return total

    def smoothness(self, work: Work, x: torch.Tensor) -> torch.Tensor:
        """Return KL(p(x) || p(x + r)) in nats for ``x [b, C, H, W]``, r along the steepest growth."""
        net, p = work.net, self.parameters
        # in float32, because the probing step is far below the resolution of bfloat16
        with torch.autocast(x.device.type, enabled=False), BatchStatistics(net):
            with torch.no_grad():
                before = _log_probs(net, x).exp()
            direction = _unit(torch.randn(x.shape, generator=work.generator).to(x)).requires_grad_()
            distance = _divergence(before, _log_probs(net, x + p.vat_xi * direction))
            (slope,) = torch.autograd.grad(distance, direction)
            return _divergence(before, _log_probs(net, x + p.vat_epsilon * _unit(slope)))


def _log_probs(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = net(x)
    return logits.float().log_softmax(1)


def _unit(d: torch.Tensor) -> torch.Tensor:
    """Scale each image's direction to length 1."""
    length = d.detach().flatten(1).norm(dim=1).add(1e-8)
    unit: torch.Tensor = d.detach() / length[:, None, None, None]
    return unit


def _divergence(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.kl_div(log_q, p, reduction="batchmean")
