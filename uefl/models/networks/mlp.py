"""``mlp``: a multi-layer perceptron for the columns of a table."""

from __future__ import annotations

from torch import nn

from .base import Network, network


@network("mlp")
class MLP(Network):
    """Two hidden layers of ``width`` units with batch norm, and one feature vector for each row."""

    inputs = "columns"

    def encoder(self) -> nn.Module:
        """Make the layers: columns [B, F] -> features [B, width, 1, 1]."""
        width, layers = self.settings.width, list[nn.Module]()
        for inputs in (self.shape[0], width):
            layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Unflatten(1, (width, 1, 1)))
