"""What goes wrong in a deployed federation, done on purpose with real processes on this machine, and what a run makes of it.

Each scenario starts a SuperLink, three silos and a run of two arms of three rounds, breaks something, and checks that the run goes on or
stops with a clear line, and that nothing but the round in flight is lost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

from ..engines.flower import QUIET
from .processes import free_port

SECRET = "patient 7"
"""stands for what an exception may tell of the data"""
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
_LINES = 9  # of metrics.jsonl: rounds x silos
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

    def superlink(self) -> subprocess.Popen[bytes]:
        """A SuperLink that keeps its state in a file."""
        where = ("--host", "127.0.0.1", "--port", self.port, "--database", self.folder / "state.db")
        return self.start("uefl.deploy.superlink", os.getpid(), "--insecure", "--isolation", "process", *where, log="superlink.log")

    def silo(self, name: str, fault: str | None = None) -> subprocess.Popen[bytes]:
        """A silo, which in the second round does what its fault says."""
        program = ("uefl", "silo") if fault is None else ("uefl.deploy.faulty", fault)
        options = ("--simulate", name, "--superlink", self.place, "--device", "cpu", "--parent", os.getpid())
        return self.start(*program, *options, log=f"{name}.log")

    def all(self, **faults: str) -> None:
        """A SuperLink and every silo; faults by name, with an underscore in the place of the hyphen."""
        self.superlink()
        for name in SILOS:
            self.silo(name, faults.get(name.replace("-", "_")))

    def train(self, out: str = "run", *options: object) -> subprocess.Popen[bytes]:
        """Begin a run, or go on with it where there is one."""
        what = ("--resume", out) if (self.folder / out / "config.toml").exists() else ("tiny.toml", "--out", out)
        where = ("--engine", "flower", "--superlink", self.place, "--silos", len(SILOS), "--device", "cpu", "--wait", 120)
        return self.start("uefl", "train", *what, *(options or where), log=f"{out}.log")

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


def _check(true: bool, what: str, ended: Ended | None = None) -> None:
    if not true:
        tail = "" if ended is None else f" (exit code {ended.code}): {' | '.join(ended.said.splitlines()[-3:])}"
        raise AssertionError(f"{what}{tail}")


# --- scenarios -----------------------------------------------------------------------------------------------------


def _left_out(reason: str, fault: str, **keys: float) -> Callable[[Path], str]:
    """A fault that costs one silo one round: the run goes on, counts it, and says so with its exit code."""

    def play(folder: Path) -> str:
        with _stage(folder, **keys) as stage:
            stage.all(silo_1=fault)
            ended = stage.end(stage.train())
            line = next((line for line in ended.said.splitlines() if "left out silo-1" in line), "")
            _check(ended.code == 1 and reason in line, f"expected 'left out silo-1: {reason}'", ended)
            _check(SECRET not in ended.said, "the text of the exception reached the server")
            outcome = json.loads((stage.folder / "run" / "summary.json").read_text())["arms"]["uefl"]
            _check(outcome["rejected"] >= 1, "it is not counted")
            return f"goes on; {line.strip()}; exit code 1"

    return play


def _quorum(folder: Path) -> str:
    with _stage(folder, quorum=1.0) as stage:
        stage.all(silo_1="nan")
        ended = stage.end(stage.train())
        _check(ended.code == 1 and "the quorum is 3" in ended.said, "expected a line on the quorum", ended)
        return "stops: 2 of 3 clients sent a sound update, the quorum is 3; exit code 1"


def _client_killed(folder: Path) -> str:
    with _stage(folder) as stage:
        stage.superlink()
        others = [stage.silo(name) for name in SILOS if name != "silo-1"]
        dying = stage.silo("silo-1", "dies")
        run = stage.train()
        stage.until("silo-1 to die", lambda: dying.poll() is not None)
        stage.silo("silo-1")
        ended = stage.end(run)
        _check(ended.code == 0 and all(other.poll() is None for other in others), "expected a finished run", ended)
        _check(stage.metrics() == stage.undisturbed(), "the metrics differ from those of an undisturbed run")
        return "gets its message again; same metrics, bit for bit; exit code 0"


def _client_gone(folder: Path) -> str:
    with _stage(folder) as stage:
        stage.all(silo_1="dies")
        ended = stage.end(stage.train())
        _check(ended.code == 1 and "left out silo-1: it is gone" in ended.said, "expected 'it is gone'", ended)
        return "left out silo-1: it is gone, in every round from then on; exit code 1"


def _server_killed(folder: Path) -> str:
    with _stage(folder) as stage:
        stage.all()
        run = stage.train()
        stage.until("a round", stage.measured(3))
        run.kill()
        run.wait()
        _check(not stage.measured(_LINES)(), "the run was too quick for this scenario")
        ended = stage.end(stage.train())
        _check(ended.code == 0, "expected a finished run", ended)
        _check(stage.metrics() == stage.undisturbed(), "the metrics differ from those of an undisturbed run")
        return "goes on with --resume, with the same silos; same metrics, bit for bit"


def _superlink_killed(folder: Path) -> str:
    with _stage(folder) as stage:
        superlink = stage.superlink()
        for name in SILOS:
            stage.silo(name)
        run = stage.train()
        stage.until("a round", stage.measured(3))
        superlink.kill()
        superlink.wait()
        stage.superlink()
        ended = stage.end(run)
        if ended.code != 0:
            _check(ended.code == 1 and "go on with" in ended.said, "expected a clear line", ended)
            ended = stage.end(stage.train())
        _check(ended.code == 0, "expected a finished run", ended)
        _check(stage.metrics() == stage.undisturbed(), "the metrics differ from those of an undisturbed run")
        return "waits until it is back; same metrics, bit for bit"


def _checkpoint(folder: Path) -> str:
    with _stage(folder) as stage:
        stage.all()
        run = stage.train()
        stage.until("a checkpoint", stage.measured(3))
        run.send_signal(signal.SIGINT)
        stage.end(run)
        (path,) = (stage.folder / "run").glob("checkpoint-*.safetensors")
        os.truncate(path, path.stat().st_size // 2)
        before = stage.metrics()
        ended = stage.end(stage.train())
        _check(ended.code == 2 and "truncated or altered" in ended.said, "expected a line on the checkpoint", ended)
        _check(stage.metrics() == before, "it touched the metrics")
        return "refused: truncated or altered; exit code 2"


def _port_taken(folder: Path) -> str:
    with _stage(folder) as stage, HTTPServer(("127.0.0.1", stage.port), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        superlink, run = stage.superlink(), stage.train()
        ended = stage.end(run)
        _check(superlink.wait(60) != 0, "the SuperLink did not say so")
        other.shutdown()
        _check(ended.code == 2 and "refuses a run" in ended.said, "expected a line", ended)
        return "the SuperLink does not start; the run: refuses a run; exit code 2"


def _two_runs(folder: Path) -> str:
    with _stage(folder) as stage:
        stage.all()
        runs = {out: stage.train(out) for out in ("run", "other")}
        ended = {out: stage.end(run, out) for out, run in runs.items()}
        for one in ended.values():
            _check(one.code == 0, "expected a finished run", one)
        _check(stage.metrics() == stage.metrics("other") == stage.undisturbed(), "the metrics differ")
        return "both finish over the same silos; same metrics, bit for bit"


class Scenario(NamedTuple):
    """A row of the table."""

    fault: str
    wanted: str
    play: Callable[[Path], str]
    """in an empty folder; returns what was found, raises AssertionError where that is not what is wanted"""


_GOES_ON = "the run goes on without it, counts it, exit code 1"
SCENARIOS = {
    "raises": Scenario("a client raises", f"{_GOES_ON}; its words stay with it", _left_out("its computation failed", "raises")),
    "nan": Scenario("an update has a NaN", _GOES_ON, _left_out("values is not finite", "nan")),
    "shape": Scenario("an update of another shape", _GOES_ON, _left_out("expected torch.float32", "shape")),
    "dtype": Scenario("an update of another type", _GOES_ON, _left_out("is torch.float64", "dtype")),
    "norm": Scenario("an update of absurd length", _GOES_ON, _left_out("more than max_update_norm", "norm", norm=1e3)),
    "late": Scenario("a client past the deadline", _GOES_ON, _left_out("deadline passed", "late", deadline=15.0)),
    "client": Scenario("a client killed -9 in a round, started again", "the same run, bit for bit", _client_killed),
    "gone": Scenario("a client killed -9, not started again", _GOES_ON, _client_gone),
    "quorum": Scenario("fewer sound updates than the quorum", "the run stops, exit code 1", _quorum),
    "server": Scenario("the server killed -9 in a round, resumed", "the same run, bit for bit", _server_killed),
    "superlink": Scenario("the SuperLink killed -9, started again", "the same run, bit for bit", _superlink_killed),
    "checkpoint": Scenario("a truncated checkpoint", "refused, exit code 2", _checkpoint),
    "port": Scenario("the port is taken", "a line, exit code 2", _port_taken),
    "two": Scenario("two runs at once", "both finish, bit for bit", _two_runs),
}


def play(name: str) -> str:
    """Play a scenario in a folder of its own; what was found.

    Raises:
        AssertionError: it is not what is wanted.
    """
    with tempfile.TemporaryDirectory(prefix="uefl-chaos-") as folder:
        return SCENARIOS[name].play(Path(folder))


@contextmanager
def _stage(folder: Path, **keys: float) -> Iterator[Stage]:
    stage = Stage(folder, **keys)
    try:
        yield stage
    finally:
        stage.close()
