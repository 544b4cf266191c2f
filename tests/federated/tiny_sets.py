"""A federation of unlabeled sets of three distinct classes, small enough to train in a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from uefl.config import Config
from uefl.data.federation import ClientData, Federation, ServerData, SetData
from uefl.data.partitions.unlabeled import client_sets
from uefl.data.priors import draw_priors, realized

from . import tiny
from .tiny import split

KEYS: dict[str, Any] = {
    "run": {"precision": "fp32"},
    "data": {"labeled": 2, "validation": 1},
    "model": {"encoder": "cnn5x5", "width": 4},
    "training": {"rounds": [3], "batch_size": 16, "lr": 5e-3, "local_epochs": 1},
}


def settings(algorithm: str, **keys: Any) -> Config:
    return tiny.settings(algorithm, KEYS, **keys)


def federation(clients: int = 2, images: int = 60, sets: int = 4, noise: float = 0.2) -> Federation:
    data_of = []
    for c in range(clients):
        rng, mine = np.random.default_rng(c), split(images, 10 * c, noise)
        labels = mine.labels.numpy()
        chosen, ids = client_sets(labels, draw_priors(rng, sets, 3), rng)
        table = torch.from_numpy(realized(labels[chosen], ids, sets, 3))
        test = split(24, 10 * c + 1, noise)
        data = SetData(mine.images[chosen], torch.from_numpy(ids), table, mine.labels[chosen], None, test)
        data_of.append(ClientData.of(f"client-{c}", data))
    server = ServerData(split(30, 98, noise), split(30, 99, noise))
    return Federation(
        "sets", tuple(data_of), ("a", "b", "c"), (1, 8, 8), (0.3,), (0.4,), (), server, digest="tiny sets"
    )


def arm(cfg: Config, fed: Federation | None = None, **more: Any) -> Any:
    return tiny.arm(cfg, fed or federation(), **more)


def smallest_surrogate_loss(data: SetData, *, legacy: bool = False) -> float:
    """Return the loss of a perfect classifier on a client's sets, the minimum of training, in nats.

    A perfect classifier gives the class k of an image the probability 1. Set m then has the posterior pi_m
    priors[m, k] / sum, and the result is the mean loss of these posteriors. The published loss, ``legacy``,
    applies softmax to the posterior once more.
    """
    sizes = data.sizes.numpy()
    # share of all images that are in set m and of class k
    joint = data.priors.numpy() * (sizes / sizes.sum())[:, None]
    g = joint / np.maximum(joint.sum(0), np.finfo(np.float64).tiny)
    loss = np.log(np.exp(g).sum(0)) - g if legacy else -np.log(np.maximum(g, np.finfo(np.float64).tiny))
    return float((joint * loss).sum())
