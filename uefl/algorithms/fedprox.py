"""FedProx: a proximal term holds clients near the received model.

Source: Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020). The loss is L + (mu/2) |w
- w_t|^2 over the trainable parameters, w_t the model of the round, without the running statistics of batch
norm. Under Adam the gradient mu (w - w_t) is added before the moments are updated. Every client takes all its
steps; the paper also allows partial work.
"""

from __future__ import annotations

import torch
from pydantic import Field

from ..client.work import Work
from . import base
from .base import Algorithm, register


@register("fedprox")
class FedProx(Algorithm):
    """FedAvg with a proximal term, and FedAvg bit for bit with ``mu = 0``."""

    class Parameters(base.Parameters):
        """Parameters of FedProx."""

        mu: float = Field(0.01, ge=0)
        """weight of half the squared distance to the received model"""

    static_step = True

    def before_round(self, work: Work) -> None:
        """Keep the model that was sent."""
        work.memory["sent"] = work.values.clone()

    def regularize(self, work: Work, gradient: torch.Tensor) -> bool:
        """Add the gradient of the proximal term, mu (w - w_t)."""
        if self.parameters.mu == 0:
            return False
        torch.sub(work.values, work.memory["sent"], out=gradient).mul_(self.parameters.mu)
        return True
