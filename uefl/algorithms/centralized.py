"""Centralized training: one model on the images of all clients.

This is a baseline for experiments on one machine, not a federated method: the images leave the clients. In a
round the server trains over all images for the number of epochs of a client, with the optimizer of the run.
Clients only measure.
"""

from __future__ import annotations

import torch

from ..data.federation import Federation, LabeledData, ServerData, Split
from ..server.teacher import Teacher
from ..server.turn import Turn
from . import base
from .base import Algorithm, Record, State, register


@register("centralized")
class Centralized(Algorithm):
    """One model on the training images of all clients, a baseline for experiments on one machine."""

    trains_clients = False

    class Parameters(base.Parameters):
        """Parameters of centralized training."""

        keep_optimizer: bool = True
        """keep the optimizer's state between rounds; `false`: a new optimizer in every round, as at
        clients"""

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Refuse a federation with images that cannot be read here."""
        federation.clients[0].load()

    def server_data(self, federation: Federation) -> ServerData | None:
        """Return the training images of all clients."""
        data = [client.load() for client in federation.clients]
        splits = [each.train for each in data if isinstance(each, LabeledData)]
        pooled = Split(
            torch.cat([split.images for split in splits]), torch.cat([split.labels for split in splits])
        )
        return ServerData(pooled, None)

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Return the state of FedAvg and the loss of the last round."""
        state = super().server_state(values, buffers, net)
        state.plain["server_loss"] = None
        return state

    def end_round(self, state: State, turn: Turn, server: Teacher | None) -> None:
        """Train the model on the images of all clients."""
        assert server is not None
        keep = self.parameters.keep_optimizer
        state.plain["server_loss"] = server.train(
            state.tensors, seed=self.context.seed, round=turn.round, epochs=None, loss=self.loss, keep=keep
        )

    def record(self, state: State, client: str, turn: Turn) -> Record:
        """Return the loss of the server's training."""
        return {"server_loss": state.plain["server_loss"]}
