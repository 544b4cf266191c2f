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
            "last",
            description="what stays with the client: the `last` linear layer of all, the whole `head`, `all` (training apart), or `none`",
        )

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """The usual network, with a mark on each layer that is personal."""
        net = super().build_model(spec)
        for module in self._personal(net):
            module.personal = True  # type: ignore[assignment]
        return net

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """By the mark that the layer has."""
        return getattr(owner, "personal", False) is True

    def _personal(self, net: nn.Module) -> list[nn.Module]:
        """The layers that stay with the client.

        Raises:
            UserError: the network has none of the kind that was asked for.
        """
        personal = self.parameters.personal
        if personal == "none":
            return []
        linear: list[nn.Module] = [module for module in net.modules() if isinstance(module, nn.Linear)]
        head = getattr(net, "head", None)
        choices: dict[str, list[nn.Module]] = {
            "last": linear[-1:],
            "head": list(head.modules()) if isinstance(head, nn.Module) else [],
            "all": list(net.modules()),
        }
        chosen = choices[personal]
        if not any(True for module in chosen for _ in module.parameters(recurse=False)):
            what = {"last": "no linear layer", "head": "no part called 'head' that has parameters", "all": "no parameters"}[personal]
            raise UserError(f"key 'personal': the network has {what}, so {personal!r} leaves nothing with the clients; choose another one")
        return chosen
