"""Federated learning with extensible codebooks (UEFL): algorithms, silos, runs and reports."""

from uefl_kernels import __version__

__all__ = ["__version__"]
