"""Exact, fused kernels for vector quantisation as PyTorch ops, on CPU and GPU."""

from ._library import backend, load
from ._version import __version__
from .ops.vq import VQOutput, vq, vq_with_sums
from .ops.vq_assign import vq_assign

__all__ = ["COMPILED", "VQOutput", "backend", "vq", "vq_assign", "vq_with_sums", "__version__"]

COMPILED: bool = load()
"""True when the compiled kernels are loaded; without them every op runs on its reference, more slowly."""
