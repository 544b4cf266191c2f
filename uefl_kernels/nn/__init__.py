"""Layers on the ops: quantizers that replace vector-quantize-pytorch's, ``ExtensibleCodebook``,
``MCDropout``."""

from ._losses import LossBreakdown
from .extensible_codebook import ExtensibleCodebook
from .mc_dropout import MCDropout
from .residual_vq import GroupedResidualVQ, ResidualVQ
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
