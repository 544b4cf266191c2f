"""Whole runs of the demo in a folder, small enough for a test.

They are started, stopped anywhere, killed, and continued.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from uefl import config, run
from uefl.config import Config

KEYS = [
    'arms=["fedavg", "uefl"]',
    "clients=3",
    "angles=[0, -50, 120]",
    "train_per_client=48",
    "test_per_client=20",
    "holdout=0.25",
    "width=4",
    "hidden=16",
    "codewords=8",
    "rounds=[2, 1]",
    "local_epochs=1",
    "batch_size=16",
    "passes=3",
    "threads=1",
    "gamma=0.0",
]


class Watcher:
    """Collects the output of a run, and raises where the test asks for it."""

    def __init__(self, stop_after: int = 10**9, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.rounds, self.notices, self.calls, self.stop_after, self.error = [], [], [], stop_after, error

    def start(self, arms, rounds, clients):
        self.calls.append(("start", arms, rounds, clients))

    def arm(self, name, done_rounds):
        self.calls.append(("arm", name, done_rounds))

    def client(self, arm, round, client):
        self.calls.append(("client", arm, round, client))
        if len([c for c in self.calls if c[0] == "client"]) > self.stop_after:
            raise self.error

    def round(self, arm, round, records):
        self.rounds.append((arm, round))

    def notice(self, message):
        self.notices.append(message)


def train(cfg: Config, out: Path, observer: Watcher | None = None, device: str = "cpu", **keys: object):
    """Train a configuration into a folder."""
    observer = observer or Watcher()
    return run.train(cfg, preset="demo", out=out, device=device, data_root=None, observer=observer, **keys)


def start(out: Path, *keys: str, observer: Watcher | None = None):
    return train(config.load("demo", [*KEYS, *keys]), out, observer)


def go_on(out: Path, observer: Watcher | None = None, **keys: object):
    return run.resume(out, device="cpu", data_root=None, observer=observer or Watcher(), **keys)


def outcome(out: Path):
    """Return everything in a finished run that must repeat bit for bit."""
    summary = json.loads((out / "summary.json").read_text())
    for arm in summary["arms"].values():
        assert arm.pop("seconds") > 0
        assert arm.pop("cpu_seconds", 1) > 0  # absent if the arm trains in other processes
    models = {f.name: f.read_bytes() for f in sorted(out.glob("model-*.safetensors"))}
    return summary, (out / "metrics.jsonl").read_text(), models


def interrupted(out: Path, *keys: str, after: int = 8) -> Path:
    with pytest.raises(KeyboardInterrupt):
        start(out, *keys, observer=Watcher(stop_after=after))
    return out


_CHILD = """
import os, signal, sys
from pathlib import Path
from {module} import Watcher, start
class Killer(Watcher):
    def client(self, *under_way):
        if under_way == {when}:
            os.kill(os.getpid(), signal.SIGKILL)
start(Path(sys.argv[1]), observer=Killer())
"""


def killed(module: str, out: Path, *when: object) -> None:
    """Run a test of that module in a process that ends itself at the turn of this client in this round."""
    from tests import fresh  # the import starts a process, which few tests need

    done = fresh.python(_CHILD.format(module=module, when=when), str(out))
    assert done.returncode == -signal.SIGKILL, done.stderr
