"""Algorithms: a file each, found by name. ``base.py`` says what one is, and how it becomes known."""

from .base import Algorithm, Context, ModelSpec, Parameters, State, find, register, registry

__all__ = ["Algorithm", "Context", "ModelSpec", "Parameters", "State", "find", "register", "registry"]
