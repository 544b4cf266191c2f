"""A run: arms one after the other on the same silos, and the folder that holds all there is to know about it.

config.toml        the resolved configuration           metrics.jsonl   one line per arm, round and client
summary.json       the outcome, once the run has ended  checkpoint*     where to go on
model-*.safetensors  the final network of each arm, by parameter name, and ``codebook.<client>``
plots/, report.md  what a person looks at               events.*        for TensorBoard, where it is installed
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from . import checkpoint, config, report
from .algorithms import FedAvg, Record, build
from .algorithms.client import Client, Device
from .config import Config
from .data.build import build_silos
from .data.silo import Federation
from .engines.local import LocalEngine
from .errors import UserError


class Observer(Protocol):
    """Who watches a run."""

    def start(self, arms: list[str], rounds: int, clients: int) -> None:
        """The run begins; ``rounds`` is for each arm."""

    def arm(self, name: str, done_rounds: int) -> None:
        """An arm begins, or goes on after ``done_rounds``."""

    def client(self, arm: str, round: int, client: str) -> None:
        """A client's work of this round begins."""

    def round(self, arm: str, round: int, records: list[Record]) -> None:
        """The metrics of one round, one record per client."""

    def notice(self, message: str) -> None:
        """Something worth knowing happened."""


def train(cfg: Config, *, preset: str, out: Path, device: str, data_root: Path | None, observer: Observer) -> dict[str, Any]:
    """Run every arm of the configuration into a new folder and return the summary.

    Raises:
        UserError: the folder is in use, or the silos cannot be built; nothing was written.
        RunError: the run could not finish honestly; the folder holds what there is.
    """
    where = _device(device)
    if out.exists() and (not out.is_dir() or any(path.name != "run.lock" for path in out.iterdir())):
        raise UserError(f"{out} is in use; choose another folder with --out, or go on with that run: --resume {out}")
    _settle(cfg)
    federation = build_silos(cfg, data_root=data_root)
    room = Device(cfg, federation, where)
    out.mkdir(parents=True, exist_ok=True)
    with _lock(out):
        (out / "config.toml").write_text(f"# {preset}\n{cfg.to_toml()}")
        return _Run(cfg, preset, out, federation, room, observer).go({}, {"arm": 0, "seconds": {}, "metrics_bytes": 0})


def resume(out: Path, *, device: str, data_root: Path | None, observer: Observer) -> dict[str, Any]:
    """Go on with the run in a folder from its last round; a finished run returns its summary.

    The result is the same, bit for bit, as without the interruption, given the same device and number of threads.
    """
    where = _device(device)
    if not (out / "config.toml").is_file():
        raise UserError(f"{out} holds no run (no config.toml); start one with: uefl train PRESET --out {out}")
    with _lock(out):
        cfg = config.load(str(out / "config.toml"))
        preset = (out / "config.toml").read_text().splitlines()[0].removeprefix("# ")
        found = checkpoint.load(out)
        if (out / "summary.json").exists():
            summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
            return summary
        _settle(cfg)
        federation = build_silos(cfg, data_root=data_root)
        tensors, plain = found or ({}, {"arm": 0, "seconds": {}, "metrics_bytes": 0})
        return _Run(cfg, preset, out, federation, Device(cfg, federation, where), observer).go(tensors, plain)


class _Run:
    def __init__(self, cfg: Config, preset: str, out: Path, federation: Federation, room: Device, observer: Observer) -> None:
        self.cfg, self.preset, self.out, self.federation, self.room, self.observer = cfg, preset, out, federation, room, observer
        self.metrics = out / "metrics.jsonl"

    def go(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> dict[str, Any]:
        """Finish the arm that the checkpoint is in, then the arms after it."""
        initial = self.room.flat.values.detach().clone(), self.room.flat.statistics.clone()
        self.seconds: dict[str, float] = plain["seconds"]
        self.rejected: dict[str, int] = plain.get("rejected", {})
        self.metrics.touch()
        os.truncate(self.metrics, plain["metrics_bytes"])  # lines of a round that was measured but not yet in a checkpoint
        self.observer.start(list(self.cfg.arms), sum(self.cfg.iterations()), len(self.federation.silos))
        with _events(self.out) as events:
            for index in range(plain["arm"], len(self.cfg.arms)):
                self.room.flat.set(*initial)
                arm = self._arm(self.cfg.arms[index])
                if index == plain["arm"] and tensors:
                    arm.restore(tensors, plain["state"])
                self._finish(index, arm, events)
        summary = self._summary()
        checkpoint.write_json(self.out / "summary.json", summary)
        report.write_report(self.out)
        return summary

    def _arm(self, name: str) -> FedAvg:
        clients = {silo.name: Client(silo, self.room) for silo in self.federation.silos}
        engine = LocalEngine(clients, started=lambda client: self.observer.client(name, arm.round, client))
        arm = build(name, self.cfg, engine, self.room, self.observer.notice)
        return arm

    def _finish(self, index: int, arm: FedAvg, events: report.EventWriter | None) -> None:
        self.observer.arm(arm.arm, arm.round)
        while not arm.finished:
            begun = time.monotonic()
            records = arm.turn()
            self.seconds[arm.arm] = self.seconds.get(arm.arm, 0.0) + time.monotonic() - begun
            self.rejected[arm.arm] = arm.rejected
            if records:
                with self.metrics.open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in records)
                self.observer.round(arm.arm, records[0]["round"], records)
                if events is not None:
                    events.round(arm.arm, records[0]["round"], records)
            tensors, state = arm.state()
            plain = {
                "arm": index,
                "seconds": self.seconds,
                "rejected": self.rejected,
                "metrics_bytes": self.metrics.stat().st_size,
                "state": state,
            }
            checkpoint.save(self.out, tensors, plain)
        named = self.room.flat.named(arm.values, arm.statistics) | {f"codebook.{k}": v for k, v in arm.codebooks().items()}
        checkpoint.save_tensors(self.out / f"model-{arm.arm}.safetensors", named)

    def _summary(self) -> dict[str, Any]:
        arms = report.summarize([json.loads(line) for line in self.metrics.read_text().splitlines()])
        for name, outcome in arms.items():
            outcome |= {"seconds": round(self.seconds[name], 3), "rejected": self.rejected[name]}
        return {"schema": 1, "preset": self.preset, "seed": self.cfg.seed, "arms": arms}


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available; use --device cpu, and see `uefl doctor`")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _settle(cfg: Config) -> None:
    """What makes a run repeat itself bit for bit."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """One process per run folder; the lock goes with the process, however it ends."""
    with (out / "run.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out} is in use by another process; wait for it to end, or choose another folder") from None
        yield


@contextmanager
def _events(out: Path) -> Iterator[report.EventWriter | None]:
    writer = report.open_event_writer(out)
    try:
        yield writer
    finally:
        if writer is not None:
            writer.close()
