"""Sources of images: one module per data set, and one per layout of the user's own."""

from .base import SOURCES, source

__all__ = ["SOURCES", "source"]
