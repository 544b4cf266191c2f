"""What an algorithm is given: parameters, what its network is built for, the context of the run, and a state
to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from ..errors import UserError
from ..models.net import Net

if TYPE_CHECKING:
    from ..config import Model, Run, Training

Record = dict[str, Any]
"""The metrics of one client after one round: one line of metrics.jsonl."""


class Parameters(BaseModel):
    """The parameters of an algorithm; fields with a range and a description become keys of its arms and lines
    of the documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class ModelSpec:
    """What a network is built for."""

    settings: Model
    shape: tuple[int, ...]
    """(C, H, W)"""
    classes: int
    given: Callable[[], nn.Module] | None = None
    """makes the network that was given in Python in the place of one that ``settings`` name"""

    def network(self) -> nn.Module:
        """The network that was given, or the one that ``settings`` name.

        Raises:
            UserError: ``settings`` name one that had to be given.
        """
        if self.given is not None:
            return self.given()
        if self.settings.encoder == "given":
            raise UserError(
                "its network was given in Python; give it again: uefl.resume(out, model=...), uefl.load(out,"
                " model=...)"
            )
        return Net(self.settings, self.shape, self.classes)


@dataclass(frozen=True)
class Context:
    """What an algorithm may know of its run."""

    seed: int
    """of the run, or of one member of an ensemble"""
    run: Run
    model: Model
    training: Training
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    clients: tuple[str, ...]
    """names of the clients that are trained on, sorted"""
    network: Callable[[], nn.Module] | None = None
    """see :attr:`ModelSpec.given`"""
    examples: Mapping[str, int] = field(default_factory=dict)
    """training images of each client, as its silo reported them; empty in the process of a silo, which knows
    its own only"""
    home: bool = False
    """whether clients keep their private states themselves"""

    @property
    def spec(self) -> ModelSpec:
        """What the network is built for."""
        return ModelSpec(self.model, self.shape, len(self.classes), self.network)


@dataclass
class State:
    """The server's state between two turns; with the private states of the clients it is all that a
    checkpoint holds of an algorithm."""

    tensors: dict[str, torch.Tensor]
    """``values`` ``[P]`` and ``buffers`` ``[Q]``, the flat model without its private parts, and whatever else
    the algorithm keeps"""
    plain: dict[str, Any] = field(default_factory=dict)
    """values of JSON"""
    scratch: dict[str, Any] = field(default_factory=dict)
    """for the methods of one exchange; emptied before each, never written"""
