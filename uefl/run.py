"""A run: arms one after the other on the same silos, and the folder that holds all there is to know about it.

config.toml        the resolved configuration           metrics.jsonl   one line per arm, round and client
summary.json       the outcome, once the run has ended  checkpoint*     where to go on
model-*.safetensors  the final network of each arm, by parameter name, and ``codebook.<client>``
plots/, report.md  what a person looks at               events.*        for TensorBoard, where it is installed
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from uefl_kernels import _library as kernels

from . import checkpoint, config, report
from .algorithms import Course, Record, build, clients
from .algorithms.client import Device
from .config import Config
from .data.build import build_silos
from .data.sets import SetFederation, build_sets
from .data.silo import Federation
from .engines.local import LocalEngine
from .errors import UserError
from .models import saved
from .rules import DEALT_ONLY, SERVER_ARMS


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
        UserError: the folder is not free, or the silos cannot be built; nothing was written.
        RunError: the run could not finish honestly; the folder holds what there is.
    """
    where = _device(device)
    if cfg.path is not None and cfg.path.exists():  # the user's own data, found again from any folder
        cfg = dataclasses.replace(cfg, data=str(cfg.path.resolve()))
    _check_free(out)
    run = _prepare(cfg, preset, out, where, data_root, observer)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made ({error.strerror}); choose another folder with --out") from None
    with _lock(out):
        if (out / "config.toml").exists():
            raise UserError(f"{out} was taken by another process just now; choose another folder with --out")
        checkpoint.write_text(out / "config.toml", f"# {preset}\n{cfg.to_toml(without=_unsaid(cfg, run.federation))}")
        return run.go({}, _START)


def resume(out: Path, *, device: str, data_root: Path | None, observer: Observer) -> dict[str, Any]:
    """Go on with the run in a folder from its last round; a finished run returns its summary.

    The result is the same, bit for bit, as without the interruption, given the same device and number of threads.
    """
    where = _device(device)
    if not (out / "config.toml").is_file():
        free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
        advice = f"start one with: uefl train PRESET --out {out}" if free else "expected a run folder, as `uefl train` writes it"
        raise UserError(f"{out} holds no run (no config.toml); {advice}")
    with _lock(out):
        cfg = config.load_whole(out / "config.toml")
        preset = (out / "config.toml").read_text().splitlines()[0].removeprefix("# ")
        tensors, plain = checkpoint.load(out) or ({}, _START)
        if (out / "summary.json").exists():
            if not (out / "report.md").exists():
                report.write_report(out)
            observer.notice(f"{out} is a finished run; to run it again, name another folder or remove this one")
            summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
            return summary
        if "made_with" in plain:
            cfg = dataclasses.replace(cfg, threads=plain["made_with"]["threads"])
        return _prepare(cfg, preset, out, where, data_root, observer).go(tensors, plain)


def _check_free(out: Path) -> None:
    """A new run needs a folder of its own."""
    if (out / "summary.json").is_file():
        raise UserError(f"{out} holds a finished run already; choose another folder with --out, or see that run again: uefl report {out}")
    if (out / "config.toml").exists():
        with _lock(out):  # refuses a run that is going on
            raise UserError(f"{out} holds a run that has not finished; choose another folder with --out, or uefl train --resume {out}")
    if out.exists() and (not out.is_dir() or any(path.name != "run.lock" for path in out.iterdir())):
        raise UserError(f"{out} is in use by something that is no run; choose another folder with --out")


def _unsaid(cfg: Config, federation: Federation | SetFederation) -> tuple[str, ...]:
    """Keys at defaults that are not true of the user's own data, where they may not be set either."""
    if cfg.path is None or (cfg.path.is_file() and len(federation.silos) == cfg.clients):
        return ()
    return DEALT_ONLY if cfg.on_sets else ("clients",)


_START: dict[str, Any] = {"arm": 0, "seconds": {}, "rejected": {}, "metrics_bytes": 0}


def _prepare(cfg: Config, preset: str, out: Path, where: torch.device, data_root: Path | None, observer: Observer) -> _Run:
    """Everything that can fail because of what was asked for, before anything is written."""
    _settle(cfg, where)
    try:
        kernels.check("transition_nll" if cfg.on_sets else "vq", where)
    except RuntimeError as error:
        raise UserError(str(error)) from None
    federation = build_sets(cfg, data_root=data_root) if cfg.on_sets else build_silos(cfg, data_root=data_root)
    room = Device(cfg, federation, where)
    if isinstance(federation, Federation):
        _check_rows(cfg, federation, room)
    else:
        _check_sets(cfg, federation)
    return _Run(cfg, preset, out, federation, room, observer)


class _Run:
    def __init__(
        self, cfg: Config, preset: str, out: Path, federation: Federation | SetFederation, room: Device, observer: Observer
    ) -> None:
        self.cfg, self.preset, self.out, self.federation, self.room, self.observer = cfg, preset, out, federation, room, observer
        self.metrics = out / "metrics.jsonl"
        self.made_with = {
            "config": _digest([dataclasses.replace(cfg, threads=0).to_toml().encode()]),
            "data": _digest(t.numpy().tobytes() for t in federation.tensors()),
            "threads": torch.get_num_threads(),
            "bf16": room.autocast,
            "device": room.device.type,
            "torch": torch.__version__,
        }

    def go(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> dict[str, Any]:
        """Finish the arm that the checkpoint is in, then the arms after it."""
        self._check_origin(plain.get("made_with", self.made_with))
        self.seconds: dict[str, float] = dict(plain["seconds"])
        self.rejected: dict[str, int] = dict(plain["rejected"])
        self._cut_metrics(plain["metrics_bytes"])
        self.observer.start(list(self.cfg.arms), sum(self.cfg.iterations()), len(self.federation.silos))
        self.observer.notice(self.federation.describe())
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        if threads > cores:
            self.observer.notice(
                f"note: {threads} threads on {cores} core{'s' if cores > 1 else ''} slow each other down; set threads = {cores}"
            )
        for note in self.federation.notes:
            self.observer.notice(f"note: {note}")
        with _events(self.out, self.metrics) as events:
            for index in range(plain["arm"], len(self.cfg.arms)):
                arm = self._arm(self.cfg.arms[index])
                if index == plain["arm"] and tensors:
                    try:
                        arm.restore(tensors, plain["state"])
                    except (KeyError, TypeError) as error:
                        raise UserError(
                            f"the checkpoint in {self.out} does not fit its configuration ({error}); start again elsewhere"
                        ) from None
                self._finish(index, arm, events)
        summary = self._summary()
        checkpoint.write_json(self.out / "summary.json", summary)
        report.write_report(self.out)
        return summary

    def _check_origin(self, then: dict[str, Any]) -> None:
        """A checkpoint goes on with its own configuration and data only; elsewhere it goes on, but not bit for bit."""
        for key, what in (("config", "config.toml has been changed"), ("data", "the silos are other images than those")):
            if then.get(key) != self.made_with[key]:
                raise UserError(f"{self.out}: {what} since the checkpoint was written; restore it, or start a new run")
        changed = [f"{key} {then.get(key)} -> {value}" for key, value in self.made_with.items() if then.get(key) != value]
        if changed:
            self.observer.notice(f"not bit for bit as without the interruption: {', '.join(changed)}")

    def _cut_metrics(self, size: int) -> None:
        """Drop the lines of a round that was measured but is in no checkpoint."""
        self.metrics.touch()
        if self.metrics.stat().st_size < size:
            raise UserError(f"{self.metrics} is shorter than when the checkpoint was written; restore it, or start a new run")
        os.truncate(self.metrics, size)
        try:
            for line in self.metrics.read_text().splitlines():
                json.loads(line)
        except ValueError:
            raise UserError(f"{self.metrics} is damaged; restore it, or start a new run") from None

    def _arm(self, name: str) -> Course:
        engine = LocalEngine(clients(self.federation, self.room), started=lambda client: self.observer.client(name, arm.round, client))
        arm = build(name, self.cfg, engine, self.room, self.observer.notice, self.federation)
        return arm

    def _finish(self, index: int, arm: Course, events: report.EventWriter | None) -> None:
        self.observer.arm(arm.arm, arm.round)
        while not arm.finished:
            begun = time.monotonic()
            records = arm.turn()
            self.seconds[arm.arm] = self.seconds.get(arm.arm, 0.0) + time.monotonic() - begun
            self.rejected[arm.arm] = arm.rejected
            if records:
                with self.metrics.open("a") as file:
                    file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
                    file.flush()
                    os.fsync(file.fileno())  # the checkpoint after it counts on these bytes
                self.observer.round(arm.arm, records[0]["round"], records)
                if events is not None:
                    events.round(arm.arm, records[0]["round"], records)
            tensors, state = arm.state()
            plain = {"arm": index, "seconds": self.seconds, "rejected": self.rejected, "metrics_bytes": self.metrics.stat().st_size}
            checkpoint.save(self.out, tensors, plain | {"state": state, "made_with": self.made_with})
        networks = [(self.room.flat.named(values, statistics), codebooks) for values, statistics, codebooks in arm.networks()]
        saved.save(self.out / f"model-{arm.arm}.safetensors", self.cfg, self.federation, networks)

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


def _settle(cfg: Config, device: torch.device) -> None:
    """What makes a run repeat itself bit for bit."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)


def _check_rows(cfg: Config, federation: Federation, room: Device) -> None:
    """k-means needs as many feature vectors as codewords; better said now than after the first iteration."""
    if not {"uefl", "fedavg-vq"} & set(cfg.arms):
        return
    smallest = min(federation.silos, key=lambda silo: len(silo.train))
    per_image = room.net.positions * room.net.segments
    if len(smallest.train) * per_image < cfg.codewords:
        rows = f"{len(smallest.train)} training images of {per_image} feature vectors"
        raise UserError(f"silo {smallest.name!r} has {rows}, too few for {cfg.codewords} codewords; lower codewords")


def _check_sets(cfg: Config, federation: SetFederation) -> None:
    """What an arm needs must be there; a data set that is dealt has it by its configuration."""
    for arm in cfg.arms:
        if arm in SERVER_ARMS and federation.labeled is None:
            raise UserError(f"arm {arm!r} needs labeled images of the server; add the folder labeled, or leave out the arm")
        if arm in SERVER_ARMS and len(federation.labeled or ()) < 2:
            raise UserError(f"arm {arm!r}: the server has 1 labeled image; batch norm needs two or more in a step")
        if arm.startswith("fedavg-labeled") and any(silo.labels is None for silo in federation.silos):
            raise UserError(f"arm {arm!r} needs labels of the clients' images, which are not known; leave out the arm")
    if cfg.select == "validation" and federation.validation is None:
        raise UserError("select = 'validation' needs validation images of the server; add the folder validation, or set select = 'last'")
    few = min(federation.silos, key=lambda silo: len(silo.sets))
    if len(few.sets) < 2:
        raise UserError(f"client {few.name!r} has {len(few.sets)} image; batch norm needs two or more in a step")
    small = min(federation.silos, key=lambda silo: int(silo.sizes.max()))
    if {"fedllp", "fedllp-vat"} & set(cfg.arms) and int(small.sizes.max()) < 2:
        raise UserError(f"client {small.name!r} has sets of one image only; fedllp takes a set per step, and batch norm needs two or more")


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


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
def _events(out: Path, metrics: Path) -> Iterator[report.EventWriter | None]:
    """What is in the metrics already is written again: the events of a run that was killed may be ahead of them."""
    writer = report.open_event_writer(out, [json.loads(line) for line in metrics.read_text().splitlines()])
    try:
        yield writer
    finally:
        if writer is not None:
            writer.close()
