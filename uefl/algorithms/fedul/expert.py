"""f', a model that the server trains on its own labeled images alone, from the same start as the federated one."""

from __future__ import annotations

import torch

from ...server.teacher import Teacher
from ...server.turn import Turn
from ..base import State

_MODEL = ("values", "buffers")


def begin(state: State) -> None:
    """From the model as it is."""
    state.tensors |= {f"expert.{name}": state.tensors[name].clone() for name in _MODEL}


def train(state: State, turn: Turn, server: Teacher, *, seed: int, epochs: int, loss: str) -> None:
    """f' goes on from where it is, with its own optimizer."""
    from .sets import server_loss

    model = {name: state.tensors[f"expert.{name}"] for name in _MODEL}
    prefix = "expert.moment."
    moments = {name.removeprefix(prefix): tensor for name, tensor in state.tensors.items() if name.startswith(prefix)}
    taught = server.train(model, seed=seed, round=turn.round, epochs=epochs, moments=moments or None, loss=server_loss(loss))
    state.tensors |= {f"expert.{name}": taught.tensors[name] for name in _MODEL}
    state.tensors |= {f"{prefix}{name}": moment for name, moment in taught.moments.items()}
    state.plain["outcome"]["server_loss"] = taught.loss


def blend(state: State, share: float) -> None:
    """The model is (1 - share) f + share f', exact at 0 and at 1."""
    for name in _MODEL:
        state.tensors[name] = torch.lerp(state.tensors[name], state.tensors[f"expert.{name}"], share)


def synchronise(state: State) -> None:
    """f' goes on from the model, with a fresh optimizer."""
    for name in [name for name in state.tensors if name.startswith("expert.moment.")]:
        del state.tensors[name]
    begin(state)
