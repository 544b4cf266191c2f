"""Algorithms, one file each.

``base`` has the interface of all algorithms and the registry.
"""

from .base import Algorithm, Context, ModelSpec, Parameters, State, find, register, registry

__all__ = ["Algorithm", "Context", "ModelSpec", "Parameters", "State", "find", "register", "registry"]
