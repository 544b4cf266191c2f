"""Flower's documented commands, as processes that end with this one.

Usage: ``python -m uefl.engines.flower.commands NAME ARGUMENTS...``.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ..processes import end_with_parent


def folder_of_commands(folder: Path) -> str:
    """Write scripts of Flower's commands into a new folder, and return a PATH that begins with it.

    Flower starts some of its commands by name, and its scripts need not be on the PATH of this process.
    """
    folder.mkdir()
    names = {point.name for point in entry_points(group="console_scripts")}
    for name in (each for each in names if each == "flwr" or each.startswith(("flwr-", "flower-"))):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-m", __name__, name])} "$@"\n')
        script.chmod(0o700)
    return f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def free_port() -> int:
    """Return a free TCP port on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def without_token(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return the arguments of a program of Flower with a file in the folder in place of its token.

    Whoever has the token can read and send the messages of a run, and all users of a machine can read the
    arguments of its processes.
    """
    place, file = arguments.index("--token"), folder / f"token.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    file.touch(0o600)
    file.write_text(arguments[place + 1])
    return [*arguments[:place], "--token-file", str(file), *arguments[place + 2 :]]


if __name__ == "__main__":
    if "--token" in sys.argv:
        arguments = without_token(sys.argv[1:], Path(os.environ["FLWR_HOME"]))
        os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *arguments])
    end_with_parent()
    name = sys.argv.pop(1)
    sys.argv[0] = name
    (point,) = {*entry_points(group="console_scripts", name=name)}
    point.load()()
