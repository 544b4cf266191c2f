"""Whole runs in folders, and the same runs interrupted and resumed, which must end alike bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import uefl
from tests.federated.whole_run import outcome
from uefl.data import build

KEYS: dict[str, Any] = {
    "run": {"threads": 1, "passes": 3, "precision": "fp32"},
    "data": {"clients": 2, "train_per_client": 48, "test_per_client": 20},
    "model": {"width": 4, "hidden": 16},
    "training": {"rounds": [2, 1], "local_epochs": 1, "batch_size": 16, "lr": 1e-2},
}


class Killer:
    """Stops the process, or this thread, at one client of one round or at the n-th turn of any client."""

    def __init__(self, when=None, kill=False):
        self.when, self.kill, self.turns = when, kill, 0

    def __getattr__(self, name):
        return lambda *_: None

    def client(self, *now):
        self.turns += 1
        if self.when in (now, self.turns):
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt


def run_of(tmp_path: Path, arms: dict[str, Any], **overrides: Any) -> uefl.Run:
    """Train two clients into a folder, with ``overrides`` in the form of ``--set``."""
    return uefl.train(KEYS | {"arms": arms}, out=tmp_path / "whole", **overrides)


def run_twice(tmp_path: Path, arms: dict[str, Any], **overrides: Any) -> uefl.Run:
    """Train two clients, also interrupted in the second round and resumed, which ends alike."""
    run = run_of(tmp_path, arms, **overrides)
    with pytest.raises(KeyboardInterrupt):
        uefl.train(
            KEYS | {"arms": arms},
            out=tmp_path / "stopped",
            observer=Killer((next(iter(arms)), 2, "silo-1")),
            **overrides,
        )
    uefl.resume(tmp_path / "stopped")
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    return run


def killed_and_resumed(tmp_path: Path, arms: dict[str, Any], turns: Iterable[int], **overrides: Any) -> None:
    """Check that a run that is killed at the n-th turn of a client, for each n, has the same end."""
    from tests import fresh  # the import starts a process, which few tests need

    keys = KEYS | {"arms": arms}
    uefl.train(keys, out=tmp_path / "whole", **overrides)
    for turn in turns:
        out = tmp_path / f"killed-{turn}"
        call = f"uefl.train({keys!r}, out={str(out)!r}, observer=Killer({turn}, True), **{overrides!r})"
        done = fresh.python(f"import uefl; from {__name__} import Killer; {call}")
        assert done.returncode == -signal.SIGKILL, done.stderr
        uefl.resume(out)
        assert outcome(out) == outcome(tmp_path / "whole")


def saved_accuracy(run: uefl.Run, arm: str, client: str | None = None) -> tuple[float, float]:
    """Return the accuracy on the images of ``silo-1`` without dropout, and as the run measured it."""
    test = build(run.config.data, kind="labeled", seed=run.config.run.seed).clients[1].load().test
    probs = run.model(arm).predict(test.images, client)
    assert torch.allclose(probs.sum(1), torch.ones(len(test)), atol=1e-5)
    assert probs.shape[1] == len(run.model(arm).classes)
    return float((probs.argmax(1) == test.labels).double().mean()), run.summary[arm]["clients"]["silo-1"][
        "accuracy"
    ]
