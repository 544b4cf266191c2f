"""Flower's documented commands, as processes that end with this one: ``python -m uefl.engines.flower.commands
NAME ARGUMENTS...``."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO

from . import QUIET

PARENT = "UEFLPARENT"
"""names the process with which a command ends, in the environment"""


def folder_of_commands(folder: Path) -> str:
    """Write scripts of Flower's commands into a new folder; return a PATH that begins with it.

    Flower starts some of its commands by name, and its scripts need not be on the PATH of this process.
    """
    folder.mkdir()
    for name in {point.name for point in entry_points(group="console_scripts") if _is_flowers(point.name)}:
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(_command(name))} "$@"\n')
        script.chmod(0o700)
    return f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def start(name: str, *arguments: str, log: IO[bytes], **environment: str) -> subprocess.Popen[bytes]:
    """Start one of Flower's commands; it is interrupted when this process has ended.

    Args:
        name: of the command.
        arguments: its own.
        log: gets its output.
        environment: variables to add to the environment of this process.
    """
    return subprocess.Popen(
        [*_command(name), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=os.environ | QUIET | {PARENT: str(os.getpid())} | environment,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the others in order
    )


def end_with(parent: int) -> None:
    """Have this process interrupted when its parent ends.

    Args:
        parent: the process that has started this one.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def _is_flowers(name: str) -> bool:
    return name == "flwr" or name.startswith(("flwr-", "flower-"))


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", __name__, name]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if (parent := os.environ.pop(PARENT, None)) is not None:  # of this process, not of those it starts
        end_with(int(parent))
    name = sys.argv.pop(1)
    sys.argv[0] = name
    (point,) = {*entry_points(group="console_scripts", name=name)}
    point.load()()
