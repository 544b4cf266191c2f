"""Layers on the ops: ``VectorQuantize``, ``ResidualVQ``, ``ExtensibleCodebook``, ``MCDropout``."""

from .extensible_codebook import ExtensibleCodebook
from .mc_dropout import MCDropout
from .residual_vq import ResidualVQ
from .vector_quantize import LossBreakdown, VectorQuantize

__all__ = ["ExtensibleCodebook", "LossBreakdown", "MCDropout", "ResidualVQ", "VectorQuantize"]
