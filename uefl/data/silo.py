"""Moved to :mod:`uefl.data.federation`."""

from .federation import Split
from .old.silo import Federation, Silo

__all__ = ["Federation", "Silo", "Split"]
