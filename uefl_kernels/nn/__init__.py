"""Layers on the ops: ``VectorQuantize``, ``ResidualVQ``, ``ExtensibleCodebook``."""

from .extensible_codebook import ExtensibleCodebook
from .residual_vq import ResidualVQ
from .vector_quantize import LossBreakdown, VectorQuantize

__all__ = ["ExtensibleCodebook", "LossBreakdown", "ResidualVQ", "VectorQuantize"]
