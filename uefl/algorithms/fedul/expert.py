"""f', a model that the server trains on its own labeled images alone, from the same start as the federated
one."""

from __future__ import annotations

import torch

from ...server.teacher import Teacher
from ...server.turn import Turn
from ..base import State
from .sets import server_loss

_MODEL = ("values", "buffers")


def begin(state: State) -> None:
    """Let f' begin from the model as it is."""
    state.tensors |= {f"expert.{name}": state.tensors[name].clone() for name in _MODEL}


def train(state: State, turn: Turn, server: Teacher, *, seed: int, epochs: int, loss: str) -> None:
    """Train f' from where it is, with its own optimizer."""
    found = server.train(
        state.tensors, "expert.", seed=seed, round=turn.round, epochs=epochs, loss=server_loss(loss)
    )
    state.plain["outcome"]["server_loss"] = found


def blend(state: State, share: float) -> None:
    """The model is (1 - share) f + share f', exact at 0 and at 1."""
    for name in _MODEL:
        state.tensors[name] = torch.lerp(state.tensors[name], state.tensors[f"expert.{name}"], share)


def synchronise(state: State) -> None:
    """f' goes on from the model, with a fresh optimizer."""
    for name in [name for name in state.tensors if name.startswith("expert.moment.")]:
        del state.tensors[name]
    begin(state)
