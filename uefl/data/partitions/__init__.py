"""Partitions of the images of a source into clients: one module per scheme."""

from .base import PARTITIONS, Scheme, partition

__all__ = ["PARTITIONS", "Scheme", "partition"]
