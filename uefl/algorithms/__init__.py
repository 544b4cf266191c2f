"""Algorithms: what the server does with an engine's clients, and what a client does with a request."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config import Config
from ..data.sets import SetFederation, SetSilo
from ..data.silo import Federation, Split
from ..engines.base import Engine, Reply, Request
from .client import Client, Device
from .fedavg import FedAvg, Record
from .fedul import FedUL
from .legacy import LegacyUEFL
from .set_client import SetClient
from .uefl import UEFL

__all__ = ["FedAvg", "FedUL", "LegacyUEFL", "Record", "UEFL", "build", "clients"]


def clients(federation: Federation | SetFederation, device: Device) -> dict[str, Callable[[Request], Reply]]:
    """The client side of every silo, by name."""
    if isinstance(federation, SetFederation):
        return {silo.name: SetClient(silo, device) for silo in federation.silos}
    return {silo.name: Client(silo, device) for silo in federation.silos}


def build(
    arm: str, config: Config, engine: Engine, device: Device, notice: Callable[[str], None], federation: Federation | SetFederation
) -> FedAvg:
    """The algorithm of an arm, from the same initial model for every arm of a run."""
    args = (arm, config, engine, device.flat.values, device.flat.statistics, notice)
    if isinstance(federation, SetFederation):
        server = _server(federation, device)
        return FedUL(*args, server=server, validation=federation.validation is not None)
    if arm == "fedavg":
        return FedAvg(*args)
    if config.mode == "legacy":
        return LegacyUEFL(*args, codeword_length=device.net.codeword_length)
    return UEFL(*args, codeword_length=device.net.codeword_length, extend=arm == "uefl")


def _server(federation: SetFederation, device: Device) -> SetClient | None:
    """The server's images as those of a client: the labeled ones are one set whose classes are known, its test split is for validation."""
    pattern = federation.labeled or federation.validation
    if pattern is None:
        return None
    empty = Split(pattern.images[:0], pattern.labels[:0])
    labeled, validation = federation.labeled or empty, federation.validation or empty
    shares = labeled.labels.bincount(minlength=len(federation.classes)).double() / max(len(labeled), 1)
    return SetClient(SetSilo("server", labeled.images, torch.zeros_like(labeled.labels), shares[None], labeled.labels, validation), device)
