"""Faults of a deployed federation, and the expected outcome of the run.

Each scenario causes its fault with real processes on this machine.

Each scenario starts a SuperLink, three silos and a run of three rounds, breaks something, and checks that the
run continues or stops with a clear line, and that nothing but the round in flight is lost.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

from uefl.engines.flower import GONE, LARGE

from . import failing
from .certificates import certificate, node_key
from .cluster import LINES, LocalCluster, Sandbox, check, open_sandbox, until, without_bytes
from .flood import flood

_FILES = 256  # most files that the SuperLink may open during the flood
_FLOOD = 15.0  # seconds


def _rejected(
    reason: str, fault: str, rounds: tuple[int, ...] = (1,), **keys: float
) -> Callable[[Path, LocalCluster], str]:
    """Test a fault that rejects one silo in some rounds, with a reason that has a match.

    The run continues, counts the fault, and reports it by its exit code.
    """

    def execute(folder: Path, cluster: LocalCluster) -> str:
        with open_sandbox(folder, cluster, **keys) as sandbox:
            cluster.start_all(fault)
            ended = sandbox.end(sandbox.train())
            line = next((line for line in ended.said.splitlines() if "rejected silo-1" in line), "")
            check(ended.code == 1 and re.search(reason, line), f"expected a rejected silo-1: {reason}", ended)
            sandbox.check_rejected(reason, set(rounds))
            if len(rounds) > 1:  # the silo still works on its slow reply
                cluster.processes["silo-1"].kill()
            return f"continues; {line.strip()}; exit code 1"

    return execute


def _same(fault: str, found: str, **keys: float) -> Callable[[Path, LocalCluster], str]:
    """Test a fault that changes nothing."""

    def execute(folder: Path, cluster: LocalCluster) -> str:
        with open_sandbox(folder, cluster, **keys) as sandbox:
            cluster.start_all(fault)
            sandbox.check_same(sandbox.end(sandbox.train()))
            return found

    return execute


def _earlier(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox:
        cluster.start_all("earlier")
        ended = sandbox.end(sandbox.train())
        check(ended.code == 0 and '"reason"' not in sandbox.metrics(), "expected a finished run", ended)
        return "continues with the earlier update; exit code 0"


def _quorum(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster, quorum=1.0) as sandbox:
        cluster.start_all("nan")
        ended = sandbox.end(sandbox.train())
        check(ended.code == 1 and re.search(r"quorum .*\b3\b", ended.said), "expected the quorum, 3", ended)
        sandbox.check_rejected(r"\bvalues .*finite", {1})
        return "stops: 2 of 3 clients sent a valid update, the quorum is 3; exit code 1"


def _client_killed(fault: str) -> Callable[[Path, LocalCluster], str]:
    """Test a silo that a fault kills and that is started again."""

    def execute(folder: Path, cluster: LocalCluster) -> str:
        with open_sandbox(folder, cluster) as sandbox:
            cluster.start_all(fault)
            before, run = dict(cluster.processes), sandbox.train()
            until("silo-1 to die", lambda: before["silo-1"].poll() is not None)
            cluster.start_all()
            ended = sandbox.end(run)
            sandbox.check_same(ended)
            _check_alive(cluster, before, {"silo-1"})
            return "gets its message again; same metrics, bit for bit; exit code 0"

    return execute


def _check_alive(cluster: LocalCluster, before: dict[str, subprocess.Popen[bytes]], dead: set[str]) -> None:
    """Check that exactly these of the former processes have ended."""
    found = {name for name, process in before.items() if process.poll() is not None}
    check(found == dead, f"expected that {sorted(dead)} ended; it was {sorted(found)}")


def _client_gone(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox:
        cluster.start_all("dies")
        ended = sandbox.end(sandbox.train())
        check(ended.code == 1 and f"silo-1: {GONE}" in ended.said, f"expected {GONE!r}", ended)
        sandbox.check_rejected(re.escape(GONE), {1, 2})
        return "rejected silo-1: it is gone, in every round from then on; exit code 1"


def _server_killed(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox:
        cluster.start_all()
        run = sandbox.train()
        until("a round", sandbox.measured(3))
        run.kill()
        run.wait()
        check(not sandbox.measured(LINES)(), "the run was too quick for this scenario")
        return _resumed(sandbox)


def _server_killed_sending(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox:
        cluster.start_all()
        check(
            sandbox.end(sandbox.faulty_train("sending")).code == -signal.SIGKILL,
            "the server did not die in a message",
        )
        return _resumed(sandbox)


def _resumed(sandbox: Sandbox) -> str:
    """Resume a run after its server has died, with the same silos."""
    before = dict(sandbox.cluster.processes)
    sandbox.check_same(sandbox.end(sandbox.train()))
    _check_alive(sandbox.cluster, before, set())
    return "continues with --resume, with the same silos; same metrics, bit for bit"


def _superlink_away(leave: Callable[[LocalCluster], None], found: str) -> Callable[[Path, LocalCluster], str]:
    """Test a SuperLink that does not reply for a while: the run waits, or ends and continues."""

    def execute(folder: Path, cluster: LocalCluster) -> str:
        with open_sandbox(folder, cluster) as sandbox:
            cluster.start_all()
            run = sandbox.train()
            until("a round", sandbox.measured(3))
            leave(cluster)
            ended = sandbox.end(run)
            if ended.code != 0:
                check(ended.code == 1 and "--resume run" in ended.said, "expected how to continue", ended)
                ended = sandbox.end(sandbox.train())
            sandbox.check_same(ended)
            return found

    return execute


def _restart_superlink(cluster: LocalCluster) -> None:
    cluster.processes["superlink"].kill()
    cluster.processes["superlink"].wait()
    cluster.start_all()


def _failing_superlink(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox, failing.proxy(cluster.port) as (port, fails):
        cluster.start_all()
        way = ("--superlink", f"127.0.0.1:{port}")
        run = sandbox.train("run", *sandbox.over_flower(), *way)
        until("a round", sandbox.measured(3))
        fails.set()
        time.sleep(_FLOOD)
        check(sandbox.measured(LINES)() is False, "the run was too quick for this scenario")
        fails.clear()
        sandbox.check_same(sandbox.end(run))
        return "repeats its requests; same metrics, bit for bit"


def _flood_superlink(cluster: LocalCluster) -> None:
    """Open more connections than the SuperLink may have files, so that it cannot open its database."""
    number = cluster.processes["superlink"].pid
    before = resource.prlimit(number, resource.RLIMIT_NOFILE)
    resource.prlimit(number, resource.RLIMIT_NOFILE, (_FILES, before[1]))
    with flood(cluster.port, 2 * _FILES, senders=4):
        time.sleep(_FLOOD)
    resource.prlimit(number, resource.RLIMIT_NOFILE, before)


def _checkpoint(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox:
        cluster.start_all()
        # a long run, so that the signal comes before its end
        run = sandbox.train("run", *sandbox.over_flower(), "--set", "rounds=[40, 1]")
        until("a checkpoint", sandbox.measured(3))
        run.send_signal(signal.SIGINT)
        sandbox.end(run)
        # there are two files if the signal came while one replaced the other
        for path in (sandbox.folder / "run").glob("checkpoint-*.safetensors"):
            os.truncate(path, path.stat().st_size // 2)
        before = sandbox.metrics()
        ended = sandbox.end(sandbox.train())
        check(
            ended.code == 2 and re.search(r"checkpoint-\w+\.safetensors\b", ended.said),
            "expected the name of the checkpoint",
            ended,
        )
        check(sandbox.metrics() == before, "it touched the metrics")
        return "refused: truncated or altered; exit code 2"


def _port_taken(folder: Path, cluster: LocalCluster) -> str:
    with (
        open_sandbox(folder) as sandbox,
        HTTPServer(("127.0.0.1", sandbox.cluster.port), BaseHTTPRequestHandler) as other,
    ):
        threading.Thread(target=other.serve_forever, daemon=True).start()
        superlink, run = sandbox.cluster.superlink(), sandbox.train()
        ended = sandbox.end(run)
        check(superlink.wait(60) != 0, "the SuperLink did not say so")
        other.shutdown()
        check(ended.code == 2 and sandbox.cluster.place in ended.said, "expected the address", ended)
        return "the SuperLink does not start; the run: refuses a run; exit code 2"


def _two_runs(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox:
        cluster.start_all()
        runs = {out: sandbox.train(out) for out in ("run", "other")}
        ended = {out: sandbox.end(run, out) for out, run in runs.items()}
        for one in ended.values():
            check(one.code == 0, "expected a finished run", one)
        runs = [
            without_bytes(text)
            for text in (sandbox.metrics(), sandbox.metrics("other"), sandbox.undisturbed())
        ]
        check(runs[0] == runs[1] == runs[2], "the metrics differ")
        return "both finish over the same silos; same metrics, bit for bit"


def _disk_full(file: str) -> Callable[[Path, LocalCluster], str]:
    """Limit the size of the server's files, as a full disk would.

    The limit is set from outside, so the program is unchanged.
    """

    def execute(folder: Path, cluster: LocalCluster) -> str:
        with open_sandbox(folder, cluster) as sandbox:
            cluster.start_all()
            run, out = sandbox.train(), sandbox.folder / "run"
            until(
                "a checkpoint with metrics",
                lambda: sandbox.measured(3)() and any(out.glob("checkpoint-*.safetensors")),
            )
            tensors, *_ = (path.stat().st_size for path in out.glob("checkpoint-*.safetensors"))
            limit = len(sandbox.metrics()) + 100 if file == "metrics" else tensors - 1
            check(
                file == "metrics" or limit > 3 * len(sandbox.metrics()),
                "the checkpoint is too small for this scenario",
            )
            resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            ended = sandbox.end(run)
            check(
                ended.code == 1 and "uefl train --resume run" in ended.said, "expected how to continue", ended
            )
            check("Traceback" not in ended.said, "expected a line and no traceback", ended)
            ended = sandbox.end(sandbox.train())
            sandbox.check_same(ended)
            return (
                "stops with exit code 1 and prints how to continue; with space again --resume ends with the"
                " same metrics, bit for bit"
            )

    return execute


def _mid_checkpoint(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox:
        cluster.start_all()
        run = sandbox.faulty_train("checkpoint")
        check(sandbox.end(run).code == -signal.SIGKILL, "the server did not die in its checkpoint")
        check(
            len(list((sandbox.folder / "run").glob("checkpoint-*.safetensors"))) == 2,
            "expected the tensors of two checkpoints",
        )
        ended = sandbox.end(sandbox.train())
        sandbox.check_same(ended)
        return "--resume continues from the checkpoint before; same metrics, bit for bit"


def _clock(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder) as sandbox:
        sandbox.cluster.superlink()
        wrong = {
            name: sandbox.cluster.silo(name, program=("tests.federated.deploy.chaos.clock", hours, "uefl"))
            for name, hours in (("silo-0", "6h"), ("silo-1", "-6h"))
        }
        sandbox.cluster.silo("silo-2")
        run = sandbox.train(
            "run",
            "--engine",
            "flower",
            "--superlink",
            sandbox.cluster.place,
            "--silos",
            3,
            "--device",
            "cpu",
            "--wait",
            40,
        )
        for name, silo in wrong.items():
            said = sandbox.folder / f"{name}.log"
            check(
                silo.wait(120) == 2 and re.search(r"\bclock\b", said.read_text()),
                f"expected that {name} names the clock",
            )
        ended = sandbox.end(run)
        check(
            ended.code == 2 and re.search(r"\bsilo-2 .*\b3 silos\b", ended.said),
            "expected a line that says who came",
            ended,
        )
        check(not (sandbox.folder / "run").exists(), "something was written")
        return (
            "the run accepts neither; both print that the clock is to be checked, and end with exit code 2;"
            " the run prints the connected silos, exit code 2"
        )


def _certificate(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder) as sandbox:
        certificate(sandbox.folder, "127.0.0.1")
        certificate(sandbox.folder, "127.0.0.1", "other")
        sandbox.cluster.superlink(
            "--ssl-ca-certfile", "server.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"
        )
        other = ("--root-certificates", "other.pem", "--wait", 60)
        silo = sandbox.cluster.silo("silo-0", *other)
        run = sandbox.train(
            "run", "--engine", "flower", "--superlink", sandbox.cluster.place, "--silos", 1, *other
        )
        check(
            silo.wait(120) == 2 and "certificate" in (sandbox.folder / "silo-0.log").read_text(),
            "expected that the silo refuses",
        )
        ended = sandbox.end(run)
        check(ended.code == 2 and "certificate" in ended.said, "expected that the run refuses", ended)
        check(not (sandbox.folder / "run").exists(), "something was written")
        return "silo and run refuse: cannot be trusted; exit code 2; nothing is written"


def _key(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder) as sandbox:
        certificate(sandbox.folder, "127.0.0.1")
        node_key(sandbox.folder, "stranger")
        tls = (
            "--ssl-ca-certfile",
            "server.pem",
            "--ssl-certfile",
            "server.pem",
            "--ssl-keyfile",
            "server.key",
        )
        sandbox.cluster.superlink("--enable-supernode-auth", *tls)
        silo = sandbox.cluster.silo(
            "silo-0", "--root-certificates", "server.pem", "--key", "stranger.key", "--wait", 10
        )
        said = sandbox.folder / "silo-0.log"
        check(
            silo.wait(120) == 2 and re.search(r"\bpublic key\b", said.read_text()),
            "expected that the silo is refused",
        )
        return "the silo is refused, prints the reason, and ends with exit code 2"


def _same_folder(folder: Path, cluster: LocalCluster) -> str:
    with open_sandbox(folder, cluster) as sandbox:
        cluster.start_all()
        run = sandbox.train()
        until("a checkpoint", sandbox.measured(3))
        run.send_signal(signal.SIGSTOP)  # otherwise it may end before the second run starts
        second = sandbox.start("uefl", "train", "--resume", "run", "--device", "cpu", log="second.log")
        code = second.wait(120)
        run.send_signal(signal.SIGCONT)
        check(
            code == 2 and re.search(r"\brun\b.* process\b", (sandbox.folder / "second.log").read_text()),
            "expected a refusal",
        )
        ended = sandbox.end(run)
        check(
            ended.code == 0 and without_bytes(sandbox.metrics()) == without_bytes(sandbox.undisturbed()),
            "the first run was disturbed",
            ended,
        )
        return (
            "the second is refused: in use by another process, exit code 2; the first has the same metrics,"
            " bit for bit"
        )


class Scenario(NamedTuple):
    """A row of the table."""

    fault: str
    wanted: str
    execute: Callable[[Path, LocalCluster], str]
    """in an empty folder, over a cluster; returns the finding, raises AssertionError if it is not the wanted
    one"""


_GOES_ON = "the run continues without this reply and records its rejection, exit code 1"
SCENARIOS = {
    "raises": Scenario(
        "a client raises an exception",
        f"{_GOES_ON}; the text of the exception stays at the client",
        _rejected(r"\bfault computation\b", "raises"),
    ),
    "nan": Scenario("an update has a NaN", _GOES_ON, _rejected(r"\bvalues .*finite", "nan")),
    "shape": Scenario(
        "an update of another shape", _GOES_ON, _rejected(r"\bvalues .*torch\.float32 \[", "shape")
    ),
    "dtype": Scenario(
        "an update of another type", _GOES_ON, _rejected(r"\bvalues .*torch\.float64", "dtype")
    ),
    "norm": Scenario(
        "an update with a very large norm, with max_update_norm",
        _GOES_ON,
        _rejected("max_update_norm", "norm", norm=1e3),
    ),
    "large": Scenario(
        "a reply of half a gibibyte, a few megabytes on the wire",
        _GOES_ON,
        _rejected(re.escape(LARGE), "large"),
    ),
    "late": Scenario(
        "a client replies after the deadline", _GOES_ON, _rejected("deadline", "late", deadline=15.0)
    ),
    "parts": Scenario(
        "a client sends its reply in small parts for minutes, with a deadline",
        f"{_GOES_ON}, in every round from then on",
        _rejected("deadline", "parts", rounds=(1, 2), deadline=40.0),
    ),
    "silent": Scenario(
        "a client stays connected but sends no more replies, with a deadline",
        f"{_GOES_ON}, in every round from then on",
        _rejected("deadline", "silent", rounds=(1, 2), deadline=15.0),
    ),
    "edge": Scenario(
        "a client replies shortly before the deadline, in every round",
        "the same run, bit for bit",
        _same("edge", "waits; same metrics, bit for bit", deadline=15.0),
    ),
    "twice": Scenario(
        "a client sends each reply twice",
        "the same run, bit for bit",
        _same("twice", "takes one of them; same metrics, bit for bit"),
    ),
    "earlier": Scenario(
        "a client sends the reply of an earlier round",
        "the run uses this reply: a client may send any update within the limits",
        _earlier,
    ),
    "name": Scenario(
        "a client replies in the name of another one", _GOES_ON, _rejected("another client", "name")
    ),
    "client": Scenario(
        "a client is killed (SIGKILL) in a round and started again",
        "the same run, bit for bit",
        _client_killed("dies"),
    ),
    "replying": Scenario(
        "a client is killed (SIGKILL) in the middle of its reply and started again",
        "the same run, bit for bit",
        _client_killed("replying"),
    ),
    "gone": Scenario("a client is killed (SIGKILL) and not started again", _GOES_ON, _client_gone),
    "quorum": Scenario("fewer valid updates than the quorum", "the run stops, exit code 1", _quorum),
    "server": Scenario(
        "the server is killed (SIGKILL) in a round, and the run is resumed",
        "the same run, bit for bit",
        _server_killed,
    ),
    "sending": Scenario(
        "the server is killed (SIGKILL) in the middle of a message, and the run is resumed",
        "the same run, bit for bit",
        _server_killed_sending,
    ),
    "superlink": Scenario(
        "the SuperLink is killed (SIGKILL) and started again",
        "the same run, bit for bit",
        _superlink_away(_restart_superlink, "waits until it is back; same metrics, bit for bit"),
    ),
    "flood": Scenario(
        "a flood of connections and large requests at the SuperLink",
        "the same run, bit for bit",
        _superlink_away(_flood_superlink, "continues after the flood; same metrics, bit for bit"),
    ),
    "500": Scenario(
        "the SuperLink fails (HTTP 500) in a round, except for heartbeats",
        "the same run, bit for bit",
        _failing_superlink,
    ),
    "checkpoint": Scenario("a truncated checkpoint", "refused, exit code 2", _checkpoint),
    "index": Scenario(
        "the server is killed (SIGKILL) between the tensors and the index of a checkpoint",
        "the same run, bit for bit",
        _mid_checkpoint,
    ),
    "full": Scenario(
        "no space for the metrics",
        "stops with exit code 1; then the same run, bit for bit",
        _disk_full("metrics"),
    ),
    "full-checkpoint": Scenario(
        "no space for a checkpoint",
        "stops with exit code 1; then the same run, bit for bit",
        _disk_full("tensors"),
    ),
    "clock": Scenario(
        "two silos with clocks that are six hours off",
        "they are refused with the reason, exit code 2",
        _clock,
    ),
    "certificate": Scenario("a SuperLink with another certificate", "refused, exit code 2", _certificate),
    "key": Scenario("a silo with a key that is not registered", "refused, exit code 2", _key),
    "port": Scenario(
        "the port of the SuperLink is taken", "one line with the address, exit code 2", _port_taken
    ),
    "two": Scenario("two runs at the same time", "both finish, bit for bit", _two_runs),
    "folder": Scenario("two runs in one folder", "the second is refused, the first continues", _same_folder),
}


@contextmanager
def running_scenarios() -> Iterator[Callable[[str], str]]:
    """Execute scenarios by name, each in a folder of its own, over one cluster that ends with the context.

    Yields a function that returns the finding, and raises AssertionError if it is not the wanted one.
    """
    with tempfile.TemporaryDirectory(prefix="uefl-chaos-") as place:
        cluster = LocalCluster(Path(place) / "cluster")

        def execute(name: str) -> str:
            folder = Path(place) / name
            folder.mkdir()
            return SCENARIOS[name].execute(folder, cluster)

        try:
            yield execute
        finally:
            cluster.close()
