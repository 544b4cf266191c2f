"""Networks by the name that ``model.encoder`` gives them, one module each."""

from .base import NETWORKS, Network, find, network

__all__ = ["NETWORKS", "Network", "find", "network"]
