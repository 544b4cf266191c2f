"""Algorithms: what the server does with an engine's clients, and what a client does with a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..config import Config
from ..data.sets import SetFederation, SetSilo
from ..data.silo import Federation, Split
from ..engines.base import Engine, Reply, Request
from ..seeds import derive
from .client import Client, Device
from .course import Course, Network, Record
from .ensemble import Ensemble
from .fedavg import FedAvg
from .fedul import FedUL
from .legacy import LegacyUEFL
from .set_client import SetClient
from .uefl import UEFL

__all__ = ["Course", "Ensemble", "FedAvg", "FedUL", "LegacyUEFL", "Network", "Record", "UEFL", "build", "clients"]


def clients(federation: Federation | SetFederation, device: Device) -> dict[str, Callable[[Request], Reply]]:
    """The client side of every silo, by name."""
    if isinstance(federation, SetFederation):
        return {silo.name: SetClient(silo, device) for silo in federation.silos}
    return {silo.name: Client(silo, device) for silo in federation.silos}


def build(
    arm: str, config: Config, engine: Engine, device: Device, notice: Callable[[str], None], federation: Federation | SetFederation
) -> Course:
    """The algorithm of an arm, from the same initial models for every arm of a run."""
    if config.uncertainty == "ensemble":  # its first member is the run without ensemble, up to the first extension
        seeds = [derive(config.seed, "member", i) if i else config.seed for i in range(config.members)]
        heard = [notice, *[_silent] * (config.members - 1)]
        own = [_one(arm, replace(config, seed=s), engine, device, say, federation) for s, say in zip(seeds, heard, strict=True)]
        return Ensemble(own)
    return _one(arm, config, engine, device, notice, federation)


def _one(
    arm: str, config: Config, engine: Engine, device: Device, notice: Callable[[str], None], federation: Federation | SetFederation
) -> FedAvg:
    args = (arm, config, engine, *device.start(config.seed), notice)
    if isinstance(federation, SetFederation):
        server = _server(federation, device)
        return FedUL(*args, server=server, validation=federation.validation is not None)
    if arm == "fedavg":
        return FedAvg(*args)
    sizes = {"codeword_length": device.net.codeword_length, "classes": len(federation.classes)}
    if config.mode == "legacy":
        return LegacyUEFL(*args, **sizes)
    return UEFL(*args, **sizes, extend=arm == "uefl")


def _server(federation: SetFederation, device: Device) -> SetClient | None:
    """The server's images as those of a client: the labeled ones are one set whose classes are known, its test split validates."""
    pattern = federation.labeled or federation.validation
    if pattern is None:
        return None
    labeled = federation.labeled or Split(pattern.images[:0], pattern.labels[:0])
    shares = labeled.labels.bincount(minlength=len(federation.classes)).double() / max(len(labeled), 1)
    sets = torch.zeros_like(labeled.labels)
    return SetClient(SetSilo("server", labeled.images, sets, shares[None], labeled.labels, federation.validation), device)


def _silent(line: str) -> None:
    """All members have the same to say."""
