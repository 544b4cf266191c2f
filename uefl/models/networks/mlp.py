"""``mlp``: a multi-layer perceptron for the columns of a table."""

from __future__ import annotations

from torch import nn

from .base import Network, network


@network("mlp")
class MLP(Network):
    """Two hidden layers of ``width`` units with batch norm, and one feature vector for each row."""

    inputs = "columns"

    def encoder(self) -> nn.Module:
        """Make the layers."""
        return mlp(self.shape[0], self.settings.width)


def mlp(columns: int, width: int) -> nn.Sequential:
    """Build two blocks of linear layer, batch norm and ReLU: columns [B, F] -> features [B, width, 1, 1]."""
    layers: list[nn.Module] = []
    for inputs in (columns, width):
        layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Unflatten(1, (width, 1, 1)))
