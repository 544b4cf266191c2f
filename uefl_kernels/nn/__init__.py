"""Layers on the ops.

They are quantizers that replace vector-quantize-pytorch's, ``ExtensibleCodebook`` and ``MCDropout``.
"""

from ._losses import LossBreakdown
from ._model_cut import NoDropoutError
from .binary_mapper import BinaryMapper
from .extensible_codebook import ExtensibleCodebook
from .fsp import FSP
from .fsq import FSQ, GroupedResidualFSQ, ResidualFSQ
from .hierarchical_vq import HierarchicalVQ
from .latent_quantize import LatentQuantize
from .lfq import LFQ, GroupedResidualLFQ, ResidualLFQ
from .mc_dropout import MCDropout
from .random_projection import RandomProjectionQuantizer
from .residual_vq import GroupedResidualVQ, ResidualVQ
from .sequential import Sequential
from .sim_vq import ResidualSimVQ, SimVQ
from .vector_quantize import VectorQuantize

__all__ = [
    "FSP",
    "FSQ",
    "LFQ",
    "BinaryMapper",
    "ExtensibleCodebook",
    "GroupedResidualFSQ",
    "GroupedResidualLFQ",
    "GroupedResidualVQ",
    "HierarchicalVQ",
    "LatentQuantize",
    "LossBreakdown",
    "MCDropout",
    "NoDropoutError",
    "RandomProjectionQuantizer",
    "ResidualFSQ",
    "ResidualLFQ",
    "ResidualSimVQ",
    "ResidualVQ",
    "Sequential",
    "SimVQ",
    "VectorQuantize",
]
