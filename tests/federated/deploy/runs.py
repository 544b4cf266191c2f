"""Runs as a user starts them, in processes of their own: small enough for a test, on the digits that come with the package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def config(folder: Path, arms: str = "[arms.fedavg]", clients: int = 3, run: str = "") -> Path:
    """A configuration file."""
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(arms=arms, clients=clients, run=run))
    return path


def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """Run ``uefl ARGUMENTS...``."""
    command = [sys.executable, "-m", "uefl", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT, start_new_session=True)


def end(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    """Wait; exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it did not end in {seconds} s\n{out}\n{err}") from None
    return process.returncode, out, err


def uefl(*arguments: object, cwd: Path, seconds: float = 300) -> tuple[int, str, str]:
    """Run ``uefl ARGUMENTS...`` to its end."""
    return end(start(*arguments, cwd=cwd), seconds)


def children(pid: int) -> dict[int, str]:
    """Processes that a process has started, with their command lines."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def gone(pids: list[int], seconds: float = 20) -> bool:
    """Whether all processes end in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(found: object, seconds: float = 120) -> None:
    """Until a function returns something true."""
    until = time.monotonic() + seconds
    while not found():  # type: ignore[operator]
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


def rounds(folder: Path) -> int:
    """Lines of metrics so far."""
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def stop(process: subprocess.Popen[str]) -> None:
    """End a process that a test has left, and those that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
