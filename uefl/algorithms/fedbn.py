"""FedBN: batch norm stays with the client.

Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (ICLR 2021).
The scale, the shift and the running statistics of every batch norm layer are neither sent nor averaged. The
type of a layer decides whether it is batch norm. All other tensors are averaged as in FedAvg. A client that
never trained is measured with the mean of the clients' layers. Networks without batch norm train as with
FedAvg, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..fields import check_unused
from .base import Algorithm, register

if TYPE_CHECKING:
    from ..data.federation import Federation


@register("fedbn")
class FedBN(Algorithm):
    """FedAvg of all layers except batch norm."""

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse frozen batch norm, which has no statistics of a client."""
        why = f"arm {arm!r}: fedbn needs the batch norm statistics of each client"
        check_unused(self.context.model, "frozen_batch_norm", why, "model.")
        super().check(federation, arm, net)

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Return True for parameters and buffers of batch norm layers, by type."""
        return isinstance(owner, nn.modules.batchnorm._BatchNorm)
