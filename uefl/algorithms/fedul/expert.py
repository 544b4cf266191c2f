"""The model f' that the server trains on its labeled images only.

It starts with the weights of the federated model.
"""

from __future__ import annotations

import torch

from ...server.teacher import Teacher
from ...server.turn import Turn
from ..base import State
from .sets import server_loss


def begin(state: State) -> None:
    """Initialize f' with the current model."""
    state.tensors |= {f"expert.{name}": tensor.clone() for name, tensor in state.model.items()}


def train(state: State, turn: Turn, server: Teacher, *, seed: int, epochs: int, loss: str) -> None:
    """Continue the training of f', with its own optimizer."""
    found = server.train(
        state.tensors, "expert.", seed=seed, round=turn.round, epochs=epochs, loss=server_loss(loss)
    )
    state.plain["outcome"]["server_loss"] = found


def blend(state: State, share: float) -> None:
    """Set the model to (1 - share) f + share f', exact at 0 and at 1."""
    for name, tensor in state.model.items():
        state.tensors[name] = torch.lerp(tensor, state.tensors[f"expert.{name}"], share)


def synchronize(state: State) -> None:
    """Restart f' from the model, with a new optimizer."""
    for name in [name for name in state.tensors if name.startswith("expert.moment.")]:
        del state.tensors[name]
    begin(state)
