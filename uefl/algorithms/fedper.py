"""FedPer: the last layers stay with the client.

Source: Arivazhagan et al., "Federated Learning with Personalization Layers" (2019). Base and personal layers are trained together; only the
base is sent and averaged. A client that never trained is measured with the mean of the clients' personal layers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from ..errors import UserError
from . import base
from .base import Algorithm, ModelSpec, register


@register("fedper")
class FedPer(Algorithm):
    """FedAvg of everything but the head, or but its last layer; with ``personal = "none"`` FedAvg bit for bit."""

    class Parameters(base.Parameters):
        """Of FedPer."""

        personal: Literal["last", "head", "all", "none"] = Field(
            "last", description="what stays with the client: the `last` linear layer, the whole `head`, `all` (training apart), or `none`"
        )

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """The usual network; which of its layers are personal is told by their names."""
        net = super().build_model(spec)
        last = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
        if not last or not any(name.partition(".")[0] == "head" for name, _ in net.named_children()):
            raise UserError("fedper: the network has no linear layer, or no part called 'head'")
        return net

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """By the place in the network."""
        personal = self.parameters.personal
        if personal in ("all", "none"):
            return bool(personal == "all")
        if personal == "head":
            return name.startswith("head.")
        return name.startswith(("head.fc2.", "head.out."))
