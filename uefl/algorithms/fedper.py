"""FedPer: the last layers stay with the client.

Source: Arivazhagan et al., "Federated Learning with Personalization Layers" (2019). Base and personal layers
are trained together; only the base is sent and averaged. A client that never trained is measured with the
mean of the clients' personal layers.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from ..models.layers import layers
from . import base
from .base import Algorithm, ModelSpec, register


@register("fedper")
class FedPer(Algorithm):
    """FedAvg of all layers except the head or its last layer, or of all with ``personal = "none"``."""

    class Parameters(base.Parameters):
        """Parameters of FedPer."""

        personal: Literal["last", "head", "all", "none"] = "last"
        """the layers that stay with the client: the `last` linear layer, the whole `head`, `all` (separate
        training), or `none`"""

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """Build the usual network, and mark each layer that is personal."""
        net, personal = super().build_model(spec), self.parameters.personal
        for module in () if personal == "none" else layers(net, personal, "personal"):
            module.personal = True  # type: ignore[assignment]
        return net

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Return True for layers that :meth:`build_model` marked."""
        return getattr(owner, "personal", False) is True
