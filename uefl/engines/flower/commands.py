"""Flower's documented commands, as processes that end with this one: ``python -m uefl.engines.flower.commands
NAME ARGUMENTS...``."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO

from . import QUIET

PARENT = "UEFL_PARENT"
"""names the process with which a command ends, in the environment"""


def folder_of_commands(folder: Path) -> str:
    """Write scripts of Flower's commands into a new folder; return a PATH that begins with it.

    Flower starts some of its commands by name, and its scripts need not be on the PATH of this process.
    """
    folder.mkdir()
    for name in {point.name for point in entry_points(group="console_scripts") if _is_flowers(point.name)}:
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(named(name))} "$@"\n')
        script.chmod(0o700)
    return f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def named(name: str) -> list[str]:
    """Return the command line of one of Flower's commands, without its arguments."""
    return [sys.executable, "-m", __name__, name]


def start(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command, which is interrupted when this process has ended.

    Args:
        command: with its arguments; one that calls :func:`end_with_parent`.
        log: gets its output.
        environment: variables to add to the environment of this process.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **QUIET, PARENT: str(os.getpid()), **environment},
        start_new_session=True,  # Ctrl-C is for this process, which then ends the others in order
    )


def end_with(parent: int, interrupted: bool = True) -> None:
    """Have this process end when its parent ends.

    Args:
        parent: the process that has started this one.
        interrupted: end by SIGINT; otherwise at once, whatever this process does.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        if not interrupted:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def end_with_parent() -> None:
    """Have this process interrupted when the one that :func:`start` was called in has ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if (parent := os.environ.pop(PARENT, None)) is not None:  # of this process, not of those it starts
        end_with(int(parent))


def free_port() -> int:
    """Return a free TCP port on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_flowers(name: str) -> bool:
    return name == "flwr" or name.startswith(("flwr-", "flower-"))


if __name__ == "__main__":
    end_with_parent()
    name = sys.argv.pop(1)
    sys.argv[0] = name
    (point,) = {*entry_points(group="console_scripts", name=name)}
    point.load()()
