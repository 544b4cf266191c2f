"""Layers on the ops: quantisers that take the place of vector-quantize-pytorch's, ``ExtensibleCodebook``, ``MCDropout``."""

from ._losses import LossBreakdown
from .extensible_codebook import ExtensibleCodebook
from .grouped_residual_vq import GroupedResidualVQ
from .mc_dropout import MCDropout
from .residual_vq import ResidualVQ
from .sim_vq import ResidualSimVQ, SimVQ
from .vector_quantize import VectorQuantize

__all__ = [
    "ExtensibleCodebook",
    "GroupedResidualVQ",
    "LossBreakdown",
    "MCDropout",
    "ResidualSimVQ",
    "ResidualVQ",
    "SimVQ",
    "VectorQuantize",
]
