"""A server that forks ``flwr-clientapp`` for each message.

``python -m uefl.engines.flower.fork_server SOCKET`` imports Flower once, so a message costs little.

Flower unpacks the files of a run. This process imports no module from these files, so a run can only name a
program that is installed at the silo. This process opens files for writing only in the folder of the
SuperNode.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from ..processes import end_with, end_with_parent

NAME = "flwr-clientapp"
_PAUSE = 0.2  # seconds between two checks of the forks
_HAND_OVER = (
    "import json, socket, sys; end = socket.socket(socket.AF_UNIX); end.connect(sys.argv[1]);"
    " end.sendall(json.dumps(sys.argv[2:]).encode())"
)


def script(place: Path) -> str:
    """Return a shell script that sends its arguments to the server at the socket ``place``, and ends."""
    return f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", "-c", _HAND_OVER, str(place)])} "$@"\n'


class InstalledFinder:
    """Find modules in the present folders of ``sys.path``, without its later changes."""

    def __init__(self) -> None:
        self._path = list(sys.path)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, with the path of its package, or None for a top-level module."""
        return PathFinder.find_spec(name, self._path if path is None else path, target)


_CHANGED = {"os.mkdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,), "os.truncate": (0,)}
"""positions of the paths that an audit event changes"""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def write_only_in(folder: Path) -> None:
    """Raise PermissionError in this process if it creates or changes a file outside a folder.

    Flower makes the name of a folder from names in the files of a run. These names can contain "..".
    """
    inside = os.path.realpath(folder)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & _WRITES)
        for i in (0,) if writes else _CHANGED.get(event, ()):
            path = arguments[i]
            if isinstance(path, str | bytes | os.PathLike):
                place = os.path.realpath(os.fsdecode(path))
                if place != os.devnull and not Path(place).is_relative_to(inside):
                    raise PermissionError(f"{place} is outside {inside}")

    sys.addaudithook(audit)


def serve(place: str) -> None:
    """Fork for each connection, until the process ends.

    A connection sends the arguments of one ``flwr-clientapp``, and the fork runs it.
    """
    (point,) = {*entry_points(group="console_scripts", name=NAME)}
    program = point.load()
    from . import messenger  # noqa: F401 (import it before the finder changes, for all forks)

    sys.meta_path[sys.meta_path.index(PathFinder)] = InstalledFinder()  # type: ignore[type-var]
    server = os.getpid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        listener.settimeout(_PAUSE)
        write_only_in(Path(os.environ["FLWR_HOME"]))
        while True:
            _end_after_failure()
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection:
                    arguments = b"".join(iter(lambda: connection.recv(2**16), b""))  # noqa: B023
                if os.fork() == 0:
                    break
    end_with(server, interrupted=False)  # at SIGINT, Flower would try to reach a SuperNode that has ended
    sys.argv = [NAME, *json.loads(arguments)]
    program()


def _end_after_failure() -> None:
    """End this process if a fork has failed: the SuperNode would wait for the reply forever."""
    with suppress(ChildProcessError):
        _, status = os.waitpid(-1, os.WNOHANG)
        if status:
            sys.exit(f"a fork of {NAME} failed with status {status}, so its message has no reply")


if __name__ == "__main__":
    end_with_parent()
    serve(sys.argv[1])
