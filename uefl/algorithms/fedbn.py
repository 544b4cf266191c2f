"""FedBN: batch norm stays with the client.

Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (ICLR 2021).
The scale, the shift and the running statistics of every batch norm layer are neither sent nor averaged. The
type of a layer decides whether it is batch norm. All other tensors are averaged as in FedAvg. A client that
never trained is measured with the mean of the clients' layers. Networks without batch norm train as with
FedAvg, bit for bit.
"""

from __future__ import annotations

from torch import nn

from .base import Algorithm, register


@register("fedbn")
class FedBN(Algorithm):
    """FedAvg of all layers except batch norm."""

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Return True for parameters and buffers of batch norm layers, by type."""
        return isinstance(owner, nn.modules.batchnorm._BatchNorm)
