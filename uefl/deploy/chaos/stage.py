"""The stage of a scenario: a small federation over Flower on this machine, with real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ...engines.flower import QUIET
from ..processes import free_port

SILOS = ("silo-0", "silo-1", "silo-2")
_CONFIG = """
[run]
passes = 3
precision = "fp32"
threads = 1
quorum = {quorum}
deadline = {deadline}
max_update_norm = {norm}
[data]
clients = 3
train_per_client = 60
test_per_client = 20
[model]
width = 4
hidden = 16
[training]
rounds = [2, 1]
local_epochs = 1
batch_size = 16
lr = 1e-2
[arms.uefl]
codewords = 4
segments = 4
gamma = 0.0
stop_when_certain = false
"""
LINES = 9  # of metrics.jsonl: rounds x silos
SECRET = "patient 7"  # stands for what an exception may tell of the data
_SECONDS = 240.0  # for anything to happen


class Ended(NamedTuple):
    """A run of ``uefl train``."""

    code: int
    said: str


class Stage:
    """A folder, a SuperLink on a free port and silos; all processes end with it.

    Args:
        folder: a new one.
        quorum, deadline, norm: keys of ``[run]``.
    """

    def __init__(self, folder: Path, quorum: float = 0.6, deadline: float = 0.0, norm: float = 0.0) -> None:
        self.folder, self.port = folder, free_port()
        self.place = f"127.0.0.1:{self.port}"
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "tiny.toml").write_text(_CONFIG.format(quorum=quorum, deadline=deadline, norm=norm))

    def start(self, module: str, *arguments: object, log: str) -> subprocess.Popen[bytes]:
        """Run a Python module, its output in a file."""
        environment = os.environ | QUIET | {"FLWR_HOME": str(self.folder / "flwr"), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        self._processes.append(process)
        return process

    def superlink(self, *options: object) -> subprocess.Popen[bytes]:
        """Start a SuperLink that keeps its state in a file; ``options`` take the place of ``--insecure``."""
        where = ("--host", "127.0.0.1", "--port", self.port, "--database", self.folder / "state.db")
        safety = options or ("--insecure",)
        return self.start("uefl.deploy.superlink", os.getpid(), *safety, "--isolation", "process", *where, log="superlink.log")

    def silo(self, name: str, fault: str | None = None, *options: object) -> subprocess.Popen[bytes]:
        """Start a silo, which does wrong as :mod:`.faulty` or :mod:`.clock` says where a fault is named."""
        program: tuple[str, ...] = ("uefl", "silo")
        if fault is not None:
            program = ("uefl.deploy.chaos.clock", fault, "silo") if fault.endswith("h") else ("uefl.deploy.chaos.faulty", fault, "silo")
        where = ("--simulate", name, "--superlink", self.place, "--device", "cpu", "--parent", os.getpid())
        return self.start(*program, *where, *options, log=f"{name}.log")

    def all(self, **faults: str) -> None:
        """A SuperLink and every silo; faults by name, with an underscore in the place of the hyphen."""
        self.superlink()
        for name in SILOS:
            self.silo(name, faults.get(name.replace("-", "_")))

    def train(self, out: str = "run", *options: object) -> subprocess.Popen[bytes]:
        """Begin a run, or go on with it where there is one; ``options`` take the place of those of Flower."""
        return self._train("uefl", out, *options)

    def faulty_train(self, fault: str) -> subprocess.Popen[bytes]:
        """Begin a run whose server does wrong as :mod:`.faulty` says."""
        return self._train("uefl.deploy.chaos.faulty", "run", fault=(fault,))

    def _train(self, module: str, out: str, *options: object, fault: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        what = ("--resume", out) if (self.folder / out / "config.toml").exists() else ("tiny.toml", "--out", out)
        where = ("--engine", "flower", "--superlink", self.place, "--silos", len(SILOS), "--device", "cpu", "--wait", 120)
        return self.start(module, *fault, "train", *what, *(options or where), log=f"{out}.log")

    def end(self, run: subprocess.Popen[bytes], out: str = "run") -> Ended:
        """Wait for a run."""
        code = run.wait(_SECONDS)
        return Ended(code, (self.folder / f"{out}.log").read_text())

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        """Wait."""
        end = time.monotonic() + _SECONDS
        while not happened():
            if time.monotonic() > end:
                raise AssertionError(f"waited {_SECONDS:g} s for {what}")
            time.sleep(0.02)

    def measured(self, lines: int, out: str = "run") -> Callable[[], bool]:
        """Whether so many lines of metrics are there."""
        path = self.folder / out / "metrics.jsonl"
        return lambda: path.exists() and len(path.read_text().splitlines()) >= lines

    def metrics(self, out: str = "run") -> str:
        """Its metrics, all of them."""
        return (self.folder / out / "metrics.jsonl").read_text()

    def check_left_out(self, reason: str, rounds: set[int]) -> None:
        """Silo-1 was left out in these rounds, counted from 0, and nobody else; metrics and report say why, and quote no exception."""
        lines = [json.loads(line) for line in self.metrics().splitlines()]
        found = [line for line in lines if "left_out" in line]
        check({(line["client"], line["round"]) for line in found} == {("silo-1", round) for round in rounds}, f"it is recorded as {found}")
        check(all(reason in line["left_out"] for line in found), f"expected {reason!r} in {found}")
        said = self.folder / "report.log"
        self.start("uefl", "report", "run", log=said.name).wait(_SECONDS)
        page = self.folder / "run" / "report.md"
        report = page.read_text() if page.exists() else said.read_text()  # which says it where no round was finished
        check(all(re.sub(r"\W", "", line["left_out"]) in re.sub(r"\W", "", report) for line in found), "the report does not say it")
        written = [path for path in (self.folder / "run").rglob("*") if path.is_file()]
        told = [path.name for path in [*written, self.folder / "run.log"] if SECRET.encode() in path.read_bytes()]
        check(not told, f"the text of the exception is in {told}")

    def undisturbed(self) -> str:
        """The metrics of the same run in one process."""
        self.train("local", "--device", "cpu").wait(_SECONDS)
        return self.metrics("local")

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def check(true: bool, what: str, ended: Ended | None = None) -> None:
    """Raise AssertionError with what was expected, and the last lines of the run, where ``true`` is not."""
    if not true:
        tail = "" if ended is None else f" (exit code {ended.code}): {' | '.join(ended.said.splitlines()[-3:])}"
        raise AssertionError(f"{what}{tail}")


@contextmanager
def staged(folder: Path, **keys: float) -> Iterator[Stage]:
    """A stage whose processes end with the context; keys as of :class:`Stage`."""
    stage = Stage(folder, **keys)
    try:
        yield stage
    finally:
        stage.close()
