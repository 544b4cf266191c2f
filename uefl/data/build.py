"""Moved to :func:`uefl.data.build`."""

from .old.build import build_silos

__all__ = ["build_silos"]
