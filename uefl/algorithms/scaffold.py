"""SCAFFOLD: control variates correct each client's gradients towards the average gradient.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML 2020),
Algorithm 1 with option II. Client k has a control variate c_k, the mean of the gradients of its last
training. The server has their mean c. A step follows g - c_k + c.

A message has ``control [P]``, c. The client returns ``control [P]``, the change of c_k.
"""

from __future__ import annotations

import torch
from pydantic import Field

from ..aggregation import Mean, WeightedMean
from ..client.work import Work
from ..engines.base import Message, expected_like
from ..server.turn import Turn
from . import base
from .base import Algorithm, State, register


@register("scaffold")
class Scaffold(Algorithm):
    """FedAvg with control variates, and FedAvg with ``correction = 0`` and ``global_step = 1``."""

    class Parameters(base.Parameters):
        """Parameters of SCAFFOLD."""

        global_step: float = Field(1.0, gt=0)
        """the server's step size: the model moves by this share of its distance to the clients' mean"""
        correction: float = Field(1.0, ge=0, le=1)
        """weight of the correction c - c_k; 0: none, as with FedAvg"""

    static_step = True
    plain_means = True  # the changes of c_k are averaged in the same way as the model

    # --- the server's half ---------------------------------------------------------------------------------

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Return the state of FedAvg, and c, initially zero."""
        state = super().server_state(values, buffers, net)
        state.tensors["control"] = torch.zeros_like(values)
        return state

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """Return the message of FedAvg, in training with c."""
        message = super().broadcast(state, client, turn)
        if turn.train:
            message.tensors["control"] = state.tensors["control"]
            message.expects = expected_like(message.tensors)
        return message

    def prepare(self, state: State, turn: Turn) -> None:
        """Store the share of participating clients."""
        state.scratch["share"] = len(turn.participants) / len(self.context.clients)

    def averages(self, state: State) -> dict[str, Mean]:
        """Return the averages of FedAvg and of the changes of c_k."""
        return super().averages(state) | {"control": WeightedMean(torch.zeros_like(state.tensors["control"]))}

    def aggregate(self, state: State, averages: dict[str, Mean]) -> None:
        """Set the model to x + step (mean - x), and add |S|/N times the mean change to c.

        Running statistics are always the mean.
        """
        sent, control = state.tensors["values"], state.tensors["control"]
        super().aggregate(state, averages)
        state.tensors["values"] = torch.lerp(sent, state.tensors["values"], self.parameters.global_step)
        state.tensors["control"] = control + state.scratch["share"] * state.tensors["control"]

    # --- the client's half ---------------------------------------------------------------------------------

    def before_round(self, work: Work) -> None:
        """Make the correction that is added to every gradient."""
        control = work.message.tensors["control"]
        work.private.setdefault("control", torch.zeros_like(control))
        work.memory["correction"] = self.parameters.correction * (control - work.private["control"])
        work.memory["gradients"] = torch.zeros_like(control)

    def regularize(self, work: Work, gradient: torch.Tensor) -> bool:
        """Add the correction c - c_k to the gradient."""
        if self.parameters.correction == 0:
            return False
        gradient.copy_(work.memory["correction"])
        return True

    def before_step(self, work: Work, gradient: torch.Tensor) -> None:
        """Add the corrected gradient to the sum."""
        work.memory["gradients"] += gradient

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the change of c_k, whose new value is the mean of the uncorrected gradients.

        Under plain SGD the new value is c_k - c + (x - y) / (K lr), option II.
        """
        new = work.memory["gradients"] / max(work.step, 1) - work.memory["correction"]
        change = new - work.private["control"]
        work.private["control"] = new
        return super().update(work) | {"control": change}
