"""Cases and checks which show that an engine gives the same bits as the local engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.federated import tiny, tiny_sets
from uefl.algorithms.base import registry
from uefl.config import Config
from uefl.data.federation import Federation
from uefl.engines.base import Message


def _settings(name: str) -> Config:
    return tiny_sets.settings(name) if registry()[name].kind == "sets" else tiny.settings(name)


CASES = {name: (_settings, name) for name in registry() if not name.startswith("toy")}
CASES["ensemble"] = lambda name: tiny.settings("uefl", uncertainty="ensemble", members=2), ""
CASES["newcomer"] = lambda name: tiny.settings("fedper", participation=0.5), ""
RAISES, LATE, DIES = 101, 102, 103
"""seeds that make a client of ``tiny_worker`` fail"""
every_case = pytest.mark.parametrize("case", CASES)


def settings(case: str) -> Config:
    """Return the settings of a case."""
    make, name = CASES[case]
    return make(name)


def federation(cfg: Config) -> Federation:
    """Return the federation of a configuration that every process can create."""
    if cfg.kind == "sets":
        return tiny_sets.federation(images=40)
    (arm,) = cfg.arms.values()
    images = 48 if arm.algorithm == "fedbr" else 16  # FedBR needs more images for its means
    return tiny.federation(
        (images,) * 3, test_is_holdout=arm.algorithm == "uefl-published", unseen=cfg.run.participation < 1
    )


def check_same(cfg: Config, engine: object) -> None:
    """Check an engine, but only up to the end of the first iteration."""
    local, other = (
        tiny.arm(cfg, federation(cfg), wrap)[0] for wrap in (lambda here: here, lambda here: engine)
    )
    for _ in range(5):
        if not local.finished:
            assert repr(other.turn()) == repr(local.turn())
    tensors, plain = local.state()
    found, found_plain = other.state()
    assert plain == found_plain
    assert list(tensors) == list(found)
    assert all(torch.equal(tensors[name], found[name]) for name in tensors)


def check_raises(make: Callable[[Config], object]) -> None:
    """Check that an engine rejects a client that raises an error, and reports a code but not the text.

    The engine has the clients of ``tiny_worker``.
    """
    cfg = tiny.settings("fedavg", quorum=0.5, seed=RAISES)
    arm, _, notices = tiny.arm(cfg, federation(cfg), lambda local: make(cfg))
    arm.turn()
    (line,) = arm.rejected
    assert line["client"] == "silo-1"
    assert "computation" in line["reason"]
    assert not any("patient" in line for line in notices)


def messages(cfg: Config) -> dict[str, Message]:
    """Return the messages of the first round to every client."""
    caught: dict[str, Message] = {}

    class Catcher:
        def round(self, messages, deadline):
            caught.update(messages)
            raise KeyboardInterrupt

    arm = tiny.arm(cfg, federation(cfg), lambda local: Catcher())[0]
    with pytest.raises(KeyboardInterrupt):
        arm.turn()
    return caught
