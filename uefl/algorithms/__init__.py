"""Algorithms: what the server does with an engine's clients, and what a client does with a request."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Config
from ..engines.base import Engine
from .client import Device
from .fedavg import FedAvg, Record
from .legacy import LegacyUEFL
from .uefl import UEFL

__all__ = ["FedAvg", "LegacyUEFL", "Record", "UEFL", "build"]


def build(arm: str, config: Config, engine: Engine, device: Device, notice: Callable[[str], None]) -> FedAvg:
    """The algorithm of an arm, from the same initial model for every arm of a run."""
    args = (arm, config, engine, device.flat.values, device.flat.statistics, notice)
    if arm == "fedavg":
        return FedAvg(*args)
    if config.mode == "legacy":
        return LegacyUEFL(*args, codeword_length=device.net.codeword_length)
    return UEFL(*args, codeword_length=device.net.codeword_length, extend=arm == "uefl")
