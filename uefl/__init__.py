"""Federated learning with extensible codebooks (UEFL): algorithms, silos, runs and reports."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("uefl")  # not from uefl_kernels, which imports torch: the command line answers at once
except PackageNotFoundError:  # a source tree on the path, never installed
    __version__ = "unknown"

__all__ = ["__version__"]
