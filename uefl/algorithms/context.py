"""Inputs of an algorithm: parameters, network specification, context of the run, state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.inputs import IMAGES, Inputs
from ..errors import UserError
from ..fields import Section
from ..models.layers import freeze_batch_norm
from ..models.net import Net

if TYPE_CHECKING:
    from ..config import Model, RunSection, Training
    from ..engines.base import Reply

Record = dict[str, Any]
"""The metrics of one client after one round: one line of metrics.jsonl."""


class Parameters(Section):
    """Base of an algorithm's parameters.

    Fields with a range and a description become keys of its arms and lines of the documentation.
    """


@dataclass(frozen=True)
class ModelSpec:
    """Settings and shapes that a network is built from."""

    settings: Model
    shape: tuple[int, ...]
    """shape of one input, such as (C, H, W)"""
    classes: int
    given: Callable[[], nn.Module] | None = None
    """builds the network given in Python, instead of the one in ``settings``"""
    inputs: Inputs = IMAGES

    def network(self) -> nn.Module:
        """Build the network: the given one, or the one of ``settings``.

        Raises:
            UserError: ``settings`` name a network that must be given in Python, or freeze batch norm that the
                network does not have.
        """
        net = self._network()
        if self.settings.frozen_batch_norm:
            freeze_batch_norm(net)
        return net

    def _network(self) -> nn.Module:
        if self.given is not None:
            return self.given()
        if self.settings.encoder == "given":
            raise UserError(
                "the network was given in Python; give it again: uefl.resume(out, model=...), uefl.load(out,"
                " model=...)"
            )
        return Net(self.settings, self.shape, self.classes, self.inputs)


@dataclass(frozen=True)
class Context:
    """Facts of a run that an algorithm may use."""

    seed: int
    """seed of the run, or of one member of an ensemble"""
    run: RunSection
    model: Model
    training: Training
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    clients: tuple[str, ...]
    """names of the clients that train, sorted"""
    network: Callable[[], nn.Module] | None = None
    """see :attr:`ModelSpec.given`"""
    examples: Mapping[str, int] = field(default_factory=dict)
    """training images of each client, as the client reported them; empty in the process of a silo, which
    knows only its own"""
    clients_keep_states: bool = False
    """whether clients keep their private states themselves"""
    inputs: Inputs = IMAGES
    """the kind of the inputs"""
    tested: Mapping[str, int] = field(default_factory=dict)
    """test inputs of each client, the weights in the means of ``run.metrics``; empty in the process of a
    silo"""

    def reported(self, reply: Reply) -> int:
        """Return the number of training images that a client reported, or else the number in its reply."""
        return self.examples.get(reply.client, reply.examples)

    @property
    def spec(self) -> ModelSpec:
        """Return the specification of the network."""
        return ModelSpec(self.model, self.shape, len(self.classes), self.network, self.inputs)


@dataclass
class State:
    """The server's state between two turns, which is in a checkpoint."""

    tensors: dict[str, torch.Tensor]
    """``values`` ``[P]`` and ``buffers`` ``[Q]``, the flat model without its private tensors, and further
    tensors of the algorithm"""
    plain: dict[str, Any] = field(default_factory=dict)
    """values that JSON can hold"""
    scratch: dict[str, Any] = field(default_factory=dict)
    """values for the methods of one exchange; cleared before each, never written to disk"""

    @property
    def model(self) -> dict[str, torch.Tensor]:
        """Return ``values`` and ``buffers``."""
        return {name: self.tensors[name] for name in ("values", "buffers")}

    def keep_best(self, score: float) -> None:
        """Keep a copy of the state, in the state itself, if its score is higher than all before."""
        best = self.plain.pop("best", None)
        if best is None or score > best["score"]:
            best = {"score": score, "plain": copy.deepcopy(self.plain)}
            mine = {name: tensor for name, tensor in self.tensors.items() if not name.startswith("best.")}
            self.tensors = mine | {f"best.{name}": tensor.clone() for name, tensor in mine.items()}
        self.plain["best"] = best

    def take_best(self) -> None:
        """Go back to the kept copy, if there is one."""
        if "best" in self.plain:
            self.plain = self.plain["best"]["plain"]
            self.tensors = {
                name.removeprefix("best."): tensor
                for name, tensor in self.tensors.items()
                if name.startswith("best.")
            }
