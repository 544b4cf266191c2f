"""Layers on the ops: ``VectorQuantize``, ``ResidualVQ``, ``ExtensibleCodebook``."""

from .vector_quantize import LossBreakdown, VectorQuantize

__all__ = ["LossBreakdown", "VectorQuantize"]
