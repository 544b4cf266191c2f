"""FedIIR: the head's gradient stays near the average of all clients, so that one head suits all.

Source: Guo et al., "Out-of-Distribution Generalization of Federated Learning via Implicit Invariant
Relationships" (ICML 2023), with the formulas of its published code. L = CE + gamma |g - G|^2, summed over
the parameters of the head. g is the gradient of the batch's cross-entropy. G is the server's running mean of
the participants' gradients at the model of the round. The term is differentiated through g, also with respect
to the encoder.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from ..aggregation import LARGEST
from ..client.work import Batch, Work
from ..data.federation import Federation
from ..engines.base import Expected, Message, Reply
from ..models.layers import layers
from ..server.turn import Turn
from . import base
from .base import Algorithm, State, register


@register("fediir")
class FedIIR(Algorithm):
    """FedAvg with a penalty on the head's gradient, and an exchange of its own before each round.

    With ``invariance = 0`` it is FedAvg bit for bit.
    """

    class Parameters(base.Parameters):
        """Parameters of FedIIR."""

        invariance: float = Field(1e-3, ge=0)
        """gamma, weight of the squared distance between the head's gradient and the average"""
        layers: Literal["last", "head"] = "head"
        """the layers of the gradient: the whole `head`, as published, or the `last` linear layer"""
        decay: float = Field(0.95, ge=0, lt=1)
        """share of the old average of the gradients in the new average, in each round"""

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse a network without the layers of the gradient."""
        layers(net, self.parameters.layers, f"arms.{arm}.layers")
        super().check(federation, arm, net)

    # --- the average gradient ------------------------------------------------------------------------------

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: nn.Module) -> State:
        """Return the state of FedAvg, and ``gradient`` ``[G]``, the average gradient, initially zero."""
        state = super().server_state(values, buffers, net)
        if self.parameters.invariance > 0:
            state.tensors["gradient"] = torch.zeros(sum(p.numel() for p in self._parameters(net)))
        return state

    def prepare(self, state: State, turn: Turn) -> None:
        """Average the participants' gradients over all batches, at the model of the round."""
        if "gradient" not in state.tensors or not turn.train:
            return
        average = state.tensors["gradient"]
        messages = {}
        for client in turn.participants:
            message = messages[client] = super().broadcast(state, client, turn)
            message.expects = {
                "sum": Expected(tuple(average.shape), torch.float32),
                "batches": Expected((), torch.int64),
            }
        total, batches = torch.zeros_like(average, dtype=torch.float64), 0
        for reply in turn.ask(messages):
            if reply.error is None:
                total += reply.tensors["sum"]
                batches += int(reply.tensors["batches"])
        if batches:
            state.tensors["gradient"] = torch.lerp((total / batches).float(), average, self.parameters.decay)

    def rejection(self, message: Message, reply: Reply) -> str | None:
        """Reject a gradient over more batches than the client has, because their number is a weight.

        Reject a gradient so large that the loss of the other clients would overflow.
        """
        if "batches" not in reply.tensors:
            return None
        batches = int(reply.tensors["batches"])
        most = math.ceil(self.context.reported(reply) / self.context.training.batch_size)
        if not 1 <= batches <= most:
            return f"its gradient of the head covers {batches} batches, expected 1 to {most}"
        largest = reply.magnitudes["sum"]
        return f"sum has an element of {largest:.3g}, more than {LARGEST:g}" if largest > LARGEST else None

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """Return the message of FedAvg, in training with the average gradient."""
        message = super().broadcast(state, client, turn)
        if "gradient" in state.tensors and turn.train:
            message.tensors["gradient"] = state.tensors["gradient"]
        return message

    # --- the client's half ---------------------------------------------------------------------------------

    def reply(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the head's gradients, summed over the batches of one epoch in training mode."""
        work.net.train()
        total, batches = torch.zeros((), dtype=torch.float64, device=work.workspace.device), 0
        for positions in self.epoch(work):
            batch = work.batch(positions.to(work.workspace.device))
            total = total + self._gradient(work, super().loss(work, batch), create_graph=False)
            batches += 1
        return {"sum": total.float(), "batches": torch.tensor(batches)}

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy plus the distance between its gradient and the average gradient."""
        loss = super().loss(work, batch)
        if self.parameters.invariance == 0:
            return loss
        distance = self._gradient(work, loss, create_graph=True) - work.message.tensors["gradient"]
        total: torch.Tensor = loss + self.parameters.invariance * distance.square().sum()
        return total

    def _gradient(self, work: Work, loss: torch.Tensor, *, create_graph: bool) -> torch.Tensor:
        """Return the gradient ``[G]`` of the head."""
        gradients = torch.autograd.grad(loss, self._parameters(work.net), create_graph=create_graph)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def _parameters(self, net: nn.Module) -> list[nn.Parameter]:
        chosen = layers(net, self.parameters.layers, "layers")
        return [p for module in chosen for p in module.parameters(recurse=False) if p.requires_grad]
