"""Training on the server's labeled images only.

Clients only measure.
"""

from __future__ import annotations

import torch
from pydantic import Field

from ...data.federation import Federation
from ...server.teacher import Teacher
from ...server.turn import Turn
from ..base import State, register
from . import expert
from .sets import Labeled, SetAlgorithm, needs_labeled


@register("supervised")
class Supervised(SetAlgorithm):
    """Train on the server's labeled images only: a control of FedUL, without the clients."""

    trains_clients = False

    class Parameters(Labeled):
        """Parameters of training on the server only."""

        server_epochs: int = Field(1, ge=1)
        """epochs over the server's labeled images in a round"""

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Refuse a federation without labeled images at the server."""
        super().check(federation, arm, net)
        needs_labeled(federation, arm)

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Return the model and its optimizer."""
        state = super().server_state(values, buffers, net)
        expert.begin(state)
        return state

    def serve(self, state: State, turn: Turn, server: Teacher | None) -> bool:
        """Train another round at the server, without an average."""
        assert server is not None
        p = self.parameters
        expert.train(state, turn, server, seed=self.context.seed, epochs=p.server_epochs, loss=p.loss)
        expert.blend(state, 1.0)
        return True
