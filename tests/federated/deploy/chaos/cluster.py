"""A small federation over Flower on this machine.

Its processes are real, and serve one scenario after the other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from uefl.engines.flower import QUIET
from uefl.engines.flower.commands import free_port
from uefl.engines.processes import PARENT

_ROOT = Path(__file__).parents[4]  # faulty programs are modules of the tests
SILOS = ("silo-0", "silo-1", "silo-2")
CONFIG = """
[run]
passes = 3
precision = "fp32"
threads = 1
{run}
[data]
clients = {clients}
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
{arms}
"""
UEFL = "[arms.uefl]\ncodewords = 4\nsegments = 4\ngamma = 0.0\nstop_when_certain = false\n"
LINES = 9  # of metrics.jsonl: rounds x silos
SECRET = "patient 7"  # text in an exception that reveals data of the silo
_SECONDS = 240.0  # longest wait for any event


class TrainResult(NamedTuple):
    """A run of ``uefl train``."""

    code: int
    said: str


class LoggedProcesses:
    """Python modules at work in a folder, each with its output in a file there.

    All modules end with the context.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *arguments: object, log: str) -> subprocess.Popen[bytes]:
        """Run a Python module."""
        environment = (
            os.environ
            | QUIET
            | {
                "FLWR_HOME": str(self.folder / "flwr"),
                PARENT: str(os.getpid()),
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
            }
            | {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        )
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        self._all.append(process)
        return process

    def close(self) -> None:
        """End every process."""
        for process in self._all:
            if process.poll() is None:
                process.kill()
            process.wait()


class LocalCluster(LoggedProcesses):
    """A SuperLink on a free port of this machine, and silos.

    The next scenario restarts the processes that a scenario has ended.

    Args:
        folder: a new one.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.place = f"127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """by name, the SuperLink and the silos that :meth:`start_all` has started"""

    def superlink(self, *options: object) -> subprocess.Popen[bytes]:
        """Start a SuperLink that keeps its state in a file.

        ``options`` take the place of ``--insecure``.
        """
        where = ("--host", "127.0.0.1", "--port", self.port, "--database", self.folder / "state.db")
        safety = options or ("--insecure",)
        return self.start(
            "uefl.engines.flower.commands",
            "flower-superlink",
            *safety,
            "--isolation",
            "process",
            *where,
            log="superlink.log",
        )

    def silo(
        self, name: str, *options: object, program: tuple[str, ...] = ("uefl",)
    ) -> subprocess.Popen[bytes]:
        """Start a silo.

        ``program`` takes the place of the command ``uefl``.
        """
        where = ("--simulate", name, "--superlink", self.place, "--device", "cpu")
        where += ("--state", self.folder / f"{name}.state")
        return self.start(*program, "silo", *where, *options, log=f"{name}.log")

    def start_all(self, fault: str = "") -> None:
        """Start the SuperLink and every silo, of which silo-1 has the fault of :mod:`.faulty`."""
        (self.folder / "fault").write_text(fault)
        for name in ("superlink", *SILOS):
            if name not in self.processes or self.processes[name].poll() is not None:
                faulty = ("tests.federated.deploy.chaos.faulty", str(self.folder / "fault"))
                self.processes[name] = (
                    self.superlink()
                    if name == "superlink"
                    else self.silo(name, program=faulty if name == "silo-1" else ("uefl",))
                )


class Sandbox(LoggedProcesses):
    """A folder with a configuration, for runs over a cluster.

    Args:
        folder: a new one.
        cluster: the silos of the runs.
        quorum, deadline, norm: keys of ``[run]``.
    """

    def __init__(
        self,
        folder: Path,
        cluster: LocalCluster,
        quorum: float = 0.6,
        deadline: float = 0.0,
        norm: float = 0.0,
    ) -> None:
        super().__init__(folder)
        self.cluster = cluster
        own = f"quorum = {quorum}\ndeadline = {deadline}\nmax_update_norm = {norm}"
        (folder / "tiny.toml").write_text(CONFIG.format(run=own, clients=len(SILOS), arms=UEFL))

    def train(self, out: str = "run", *options: object) -> subprocess.Popen[bytes]:
        """Begin a run, or continue the run that exists.

        ``options`` replace the options for Flower.
        """
        return self._train("uefl", out, *options)

    def faulty_train(self, fault: str) -> subprocess.Popen[bytes]:
        """Begin a run with a fault of the server (see :mod:`.faulty`)."""
        return self._train("tests.federated.deploy.chaos.faulty", "run", fault=(fault,))

    def _train(
        self, module: str, out: str, *options: object, fault: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        what = (
            ("--resume", out) if (self.folder / out / "config.toml").exists() else ("tiny.toml", "--out", out)
        )
        return self.start(module, *fault, "train", *what, *(options or self.over_flower()), log=f"{out}.log")

    def over_flower(self) -> tuple[object, ...]:
        """Return the options of a run with the silos of this cluster."""
        where = ("--engine", "flower", "--superlink", self.cluster.place, "--silos", len(SILOS))
        return (*where, "--device", "cpu", "--wait", 120)

    def end(self, run: subprocess.Popen[bytes], out: str = "run") -> TrainResult:
        """Wait for a run."""
        code = run.wait(_SECONDS)
        return TrainResult(code, (self.folder / f"{out}.log").read_text())

    def measured(self, lines: int, out: str = "run") -> Callable[[], bool]:
        """Return True if the file has this number of lines of metrics."""
        return lambda: measured(self.folder / out) >= lines

    def metrics(self, out: str = "run") -> str:
        """Return all metrics of the run."""
        return (self.folder / out / "metrics.jsonl").read_text()

    def check_rejected(self, reason: str, rounds: set[int]) -> None:
        """Check that only silo-1 was rejected in these rounds, counted from 0, with a match in the reason.

        Metrics and report give the reason without the text of an exception.
        """
        lines = [json.loads(line) for line in self.metrics().splitlines()]
        found = [line for line in lines if "reason" in line]
        check(
            {(line["client"], line["round"]) for line in found}
            == {("silo-1", round + 1) for round in rounds},
            f"it is recorded as {found}",
        )
        check(all(re.search(reason, line["reason"]) for line in found), f"expected {reason!r} in {found}")
        page = self.folder / "run" / "report.md"
        if not page.exists():  # the run has stopped
            page = self.folder / "report.log"
            self.start("uefl", "report", "run", log=page.name).wait(_SECONDS)
        report = page.read_text()
        check(
            all(re.sub(r"\W", "", line["reason"]) in re.sub(r"\W", "", report) for line in found),
            "the report does not say it",
        )
        written = [path for path in (self.folder / "run").rglob("*") if path.is_file()]
        told = [
            path.name for path in [*written, self.folder / "run.log"] if SECRET.encode() in path.read_bytes()
        ]
        check(not told, f"the text of the exception is in {told}")

    def check_same(self, ended: TrainResult) -> None:
        """Check that the run has finished with the metrics of an undisturbed run."""
        check(ended.code == 0, "expected a finished run", ended)
        same = without_bytes(self.metrics()) == without_bytes(self.undisturbed())
        check(same, "the metrics differ from those of an undisturbed run")

    def undisturbed(self) -> str:
        """Return the metrics of the same run in one process."""
        return _undisturbed()


def without_bytes(metrics: str) -> list[dict[str, Any]]:
    """Return the lines without the bytes of messages: a silo keeps codewords that one process sends."""
    lines = [json.loads(line) for line in metrics.splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("bytes_")} for line in lines]


@cache
def _undisturbed() -> str:
    with tempfile.TemporaryDirectory(prefix="uefl-chaos-") as folder:
        sandbox = Sandbox(Path(folder), LocalCluster(Path(folder)))
        try:
            ended = sandbox.end(sandbox.train("run", "--device", "cpu"))
            check(ended.code == 0, "expected a finished run", ended)
            return sandbox.metrics()
        finally:
            sandbox.close()


def until(what: str, happened: Callable[[], object], seconds: float = _SECONDS) -> None:
    """Wait.

    Raises:
        AssertionError: it does not happen in time.
    """
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s for {what}")
        time.sleep(0.02)


def measured(run: Path) -> int:
    """Return the lines of metrics so far."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def check(true: object, what: str, ended: TrainResult | None = None) -> None:
    """Raise AssertionError with the expectation and the last lines of the run, where ``true`` is not."""
    if not true:
        tail = (
            "" if ended is None else f" (exit code {ended.code}): {' | '.join(ended.said.splitlines()[-3:])}"
        )
        raise AssertionError(f"{what}{tail}")


@contextmanager
def open_sandbox(folder: Path, cluster: LocalCluster | None = None, **keys: float) -> Iterator[Sandbox]:
    """Open a sandbox and end its processes with the context.

    Without a cluster, it makes its own and ends it too. Keys as of :class:`Sandbox`.
    """
    own = LocalCluster(folder) if cluster is None else cluster
    sandbox = Sandbox(folder, own, **keys)
    try:
        yield sandbox
    finally:
        sandbox.close()
        if cluster is None:
            own.close()
