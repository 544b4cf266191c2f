"""Flower's documented commands, as processes that end with this one.

Usage: ``python -m uefl.engines.flower.commands NAME ARGUMENTS...``.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
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


if __name__ == "__main__":
    end_with_parent()
    name = sys.argv.pop(1)
    sys.argv[0] = name
    (point,) = {*entry_points(group="console_scripts", name=name)}
    point.load()()
