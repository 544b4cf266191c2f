"""Moved to :func:`uefl.data.build`."""

from .old.sets import SetFederation, SetSilo, build_sets, client_parts, client_sets, overlapping_sets

__all__ = ["SetFederation", "SetSilo", "build_sets", "client_parts", "client_sets", "overlapping_sets"]
