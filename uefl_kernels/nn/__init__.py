"""Layers on the ops: ``VectorQuantize``, ``ResidualVQ``."""

from .residual_vq import ResidualVQ
from .vector_quantize import LossBreakdown, VectorQuantize

__all__ = ["LossBreakdown", "ResidualVQ", "VectorQuantize"]
