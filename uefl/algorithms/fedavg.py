"""Federated averaging (McMahan et al. 2017): every default of :class:`~uefl.algorithms.base.Algorithm`."""

from __future__ import annotations

from .base import Algorithm, register


@register("fedavg")
class FedAvg(Algorithm):
    """Clients train copies of one model, which are averaged by their examples."""
