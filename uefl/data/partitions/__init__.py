"""How the images of a source become clients: one module per scheme."""

from .base import PARTITIONS, Scheme, partition

__all__ = ["PARTITIONS", "Scheme", "partition"]
