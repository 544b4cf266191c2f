"""Local training: every client trains its own model and shares nothing.

It is a baseline for federations.
"""

from __future__ import annotations

from torch import nn

from ..data.federation import Federation
from ..errors import UserError
from .base import Algorithm, register


@register("local")
class Local(Algorithm):
    """Every client trains a model of its own from the same weights, and nothing is averaged."""

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse clients that never train, because they have no model."""
        if federation.unseen:
            raise UserError(
                f"arm {arm!r}: client {federation.unseen[0].name!r} never trains, so this arm has no model"
                " for this client; omit the arm, or the clients without training"
            )
        super().check(federation, arm, net)

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Keep the whole network private."""
        return True
