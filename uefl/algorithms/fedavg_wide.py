"""FedAvg with a wider head: the control for a method that adds parameters."""

from __future__ import annotations

import math

import torch
from pydantic import Field

from ..models.heads import Head
from ..models.net import usual
from . import base
from .base import Algorithm, ModelSpec, register


@register("fedavg-wide")
class FedAvgWide(Algorithm):
    """FedAvg with hidden units for additional parameters in the head, and FedAvg bit for bit with 0."""

    class Parameters(base.Parameters):
        """Parameters of the wider head."""

        more_parameters: int = Field(0, ge=0)
        """additional parameters of the head, rounded up to whole hidden units"""

    def build_model(self, spec: ModelSpec) -> torch.nn.Module:
        """Build the network, with the encoder's initial weights of FedAvg."""
        settings = spec.settings
        net, head = usual(super().build_model(spec), "the wider head of fedavg-wide needs")
        inputs = head.fc1.in_features
        units = math.ceil(self.parameters.more_parameters / (inputs + 1 + spec.classes))
        if units:
            net.head = Head(
                inputs,
                settings.hidden + units,
                spec.classes,
                settings.dropout,
                settings.logit_dropout,
                type(head.activation),
            )
        return net
