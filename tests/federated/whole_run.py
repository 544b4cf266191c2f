"""A run of two clients from beginning to end: stopped and resumed, and its saved model asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import uefl
from tests.federated.tiny import split

KEYS: dict[str, Any] = {
    "run": {"threads": 1, "passes": 300, "precision": "fp32"},
    "model": {"width": 4, "hidden": 16, "dropout": 0.0},
    "training": {"rounds": [2, 1], "local_epochs": 2, "batch_size": 16, "lr": 1e-2},
}


class Stopper:
    """An observer that stops the run when a client's work in the second round begins."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def client(self, arm: str, round: int, client: str) -> None:
        if (round, client) == (1, "south"):
            raise KeyboardInterrupt


def whole_run(path: Path, algorithm: str, *, far: float = 0.0, **parameters: Any) -> uefl.Run:
    """Train, once at a time and once with a stop, and expect the same files; the saved model must be as accurate as it was measured.

    Args:
        path: an empty folder.
        algorithm: its name.
        far: how far the accuracy may be from the measured one, where that is one of draws.
        parameters: of the arm.
    """
    parts = {name: (split(48, seed, noise), split(24, seed + 1, noise)) for seed, name, noise in ((0, "north", 0.1), (5, "south", 0.5))}
    clients = {name: tuple((part.images, part.labels) for part in pair) for name, pair in parts.items()}
    arms = {"arm": {"algorithm": algorithm, **parameters}}
    whole = uefl.train(KEYS, out=path / "whole", clients=clients, arms=arms)
    with pytest.raises(KeyboardInterrupt):
        uefl.train(KEYS, out=path / "stopped", clients=clients, arms=arms, observer=Stopper())
    uefl.resume(path / "stopped", clients=clients)
    assert _outcome(path / "stopped") == _outcome(path / "whole")
    model = whole.model("arm")
    for name, (_, test) in parts.items():
        probs = model.predict(test.images, name if model.clients else None)
        assert float((probs.argmax(1) == test.labels).double().mean()) == pytest.approx(
            whole.summary["arm"]["clients"][name]["accuracy"], abs=far + 1e-9
        )
    return whole


def _outcome(path: Path) -> tuple[Any, ...]:
    summary = json.loads((path / "summary.json").read_text())
    for arm in summary["arms"].values():
        arm.pop("seconds")
    return summary, (path / "metrics.jsonl").read_text(), (path / "model-arm.safetensors").read_bytes()
