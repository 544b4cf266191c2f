"""Run commands as a user does, in processes of their own.

The runs are small enough for a test, and use the digits that come with the package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.federated.deploy.chaos.cluster import CONFIG, until

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def config(folder: Path, arms: str = "[arms.fedavg]", clients: int = 3, run: str = "") -> Path:
    """Write a configuration file."""
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(arms=arms, clients=clients, run=run))
    return path


def start(*arguments: object, cwd: Path, background: bool = False) -> subprocess.Popen[str]:
    """Run ``uefl ARGUMENTS...``, with SIGINT ignored if it is as in the background of a shell script."""
    command = [sys.executable, "-m", "uefl", *map(str, arguments)]
    pipe, environment = subprocess.PIPE, os.environ | ENVIRONMENT
    first = partial(signal.signal, signal.SIGINT, signal.SIG_IGN if background else signal.SIG_DFL)
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=first,
    )


def end(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    """Wait for a process, and return its exit code, stdout and stderr."""
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
    """Return the child processes of a process, with their command lines."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in filter(_runs, map(int, (task / "children").read_text().split())):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def content(path: Path) -> bytes:
    """Return the content of a file.

    It is empty if the file is gone, for example after the end of a process.
    """
    try:
        return path.read_bytes()
    except OSError:
        return b""


def gone(pids: list[int]) -> bool:
    """Return True if all processes end in time."""
    until("processes to end", lambda: not any(map(_runs, pids)), 20)
    return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
