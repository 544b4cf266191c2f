"""Federated averaging (McMahan et al. 2017): every default of :class:`~uefl.algorithms.base.Algorithm`."""

from __future__ import annotations

from .base import Algorithm, register


@register("fedavg")
class FedAvg(Algorithm):
    """Average the clients' copies of one model, weighted by their examples."""
