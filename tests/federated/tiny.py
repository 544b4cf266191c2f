"""A federation small enough to train in a test: class-dependent blobs, one silo turned into noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from uefl import config
from uefl.algorithms import FedAvg, build
from uefl.algorithms.client import Client, Device
from uefl.config import Config
from uefl.data.silo import Federation, Silo, Split
from uefl.engines.base import Engine
from uefl.engines.local import LocalEngine

KEYS = {
    "rotations": [], "clients": 3, "rounds": [2, 1], "local_epochs": 1, "batch_size": 16, "lr": 1e-2,
    "width": 4, "hidden": 16, "codewords": 4, "segments": 4, "passes": 3, "gamma": 0.0, "precision": "fp32", "stop_when_certain": False,
}  # fmt: skip


def settings(**keys: Any) -> Config:
    return config.from_table(KEYS | keys)


def split(n: int, seed: int, noise: float) -> Split:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    clean = torch.zeros(n, 1, 8, 8)
    for i, label in enumerate(labels.tolist()):
        clean[i, :, :, 2 * label : 2 * label + 3] = 200
    noisy = (1 - noise) * clean + noise * 255 * torch.rand(n, 1, 8, 8, generator=generator)
    return Split(noisy.clamp(0, 255).to(torch.uint8), labels)


def federation(sizes: tuple[int, ...] = (48, 48, 48), noise: tuple[float, ...] = (0.1, 0.1, 0.9), legacy: bool = False) -> Federation:
    silos = []
    for i in range(len(sizes)):
        train, test = split(sizes[i], 3 * i, noise[i]), split(12, 3 * i + 1, noise[i])
        silos.append(Silo(f"silo-{i}", train, test if legacy else split(12, 3 * i + 2, noise[i]), test))
    return Federation(tuple(silos), ("a", "b", "c"), (0.3,), (0.4,))


def arm(
    name: str, cfg: Config, fed: Federation | None = None, wrap: Callable[[Engine], Engine] = lambda e: e
) -> tuple[FedAvg, Device, list[str]]:
    """The algorithm, its device, and the list that collects its notices."""
    fed = fed or federation(legacy=cfg.mode == "legacy")
    device, notices = Device(cfg, fed, torch.device("cpu")), []
    engine = wrap(LocalEngine({silo.name: Client(silo, device) for silo in fed.silos}))
    return build(name, cfg, engine, device, notices.append, fed), device, notices


def finish(algorithm: FedAvg, limit: int = 50) -> list[dict[str, Any]]:
    """Run to the end and return every record."""
    records = []
    for _ in range(limit):
        if algorithm.finished:
            return records
        records += algorithm.turn()
    raise AssertionError("the run did not end")
