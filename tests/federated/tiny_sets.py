"""A federation of unlabeled sets small enough to train in a test: three classes that a glance tells apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from uefl import config
from uefl.algorithms import FedUL, build, clients
from uefl.algorithms.client import Device
from uefl.config import Config
from uefl.data.old import sets as s
from uefl.data.priors import draw_priors, realised
from uefl.engines.local import LocalEngine

from .tiny import split

KEYS = {
    "rotations": [], "rounds": [3], "batch_size": 16, "lr": 5e-3, "local_epochs": 1, "encoder": "cnn5x5", "width": 4, "precision": "fp32",
    "labeled": 2, "validation": 1,
}  # fmt: skip


def settings(arm: str, **keys: Any) -> Config:
    return config.from_table(KEYS | {"arms": [arm]} | keys)


def federation(clients: int = 2, images: int = 60, sets: int = 4, noise: float = 0.2) -> s.SetFederation:
    silos = []
    for c in range(clients):
        rng, mine = np.random.default_rng(c), split(images, 10 * c, noise)
        labels = mine.labels.numpy()
        chosen, ids = s.client_sets(labels, draw_priors(rng, sets, 3), rng)
        table = torch.from_numpy(realised(labels[chosen], ids, sets, 3))
        test = split(24, 10 * c + 1, noise)
        silos.append(s.SetSilo(f"client-{c}", mine.images[chosen], torch.from_numpy(ids), table, mine.labels[chosen], test))
    return s.SetFederation(tuple(silos), ("a", "b", "c"), (0.3,), (0.4,), split(30, 98, noise), split(30, 99, noise), ())


def arm(cfg: Config, fed: s.SetFederation | None = None) -> tuple[FedUL, Device]:
    fed = fed or federation()
    device = Device(cfg, fed, torch.device("cpu"))
    algorithm = build(cfg.arms[0], cfg, LocalEngine(clients(fed, device)), device, lambda line: None, fed)
    assert isinstance(algorithm, FedUL)
    return algorithm, device
