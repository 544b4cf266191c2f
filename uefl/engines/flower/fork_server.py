"""A server that forks ``flwr-clientapp`` for each message.

``python -m uefl.engines.flower.fork_server SOCKET`` imports Flower once, so a message costs little. A run
brings files, which Flower unpacks. In this process no module is imported from them: a run can only name a
program that is installed at the silo. Nothing is written outside the folder of the SuperNode.
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

from .commands import end_with, end_with_parent

NAME = "flwr-clientapp"
_PAUSE = 0.2  # seconds between two looks at the forks
_HAND_OVER = (
    "import json, socket, sys; end = socket.socket(socket.AF_UNIX); end.connect(sys.argv[1]);"
    " end.sendall(json.dumps(sys.argv[2:]).encode())"
)


def script(place: Path) -> str:
    """Return a shell script that passes its arguments to the server at a socket, and ends."""
    return f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", "-c", _HAND_OVER, str(place)])} "$@"\n'


class InstalledFinder:
    """A finder of modules that ignores later changes of ``sys.path``.

    Args:
        path: the folders of installed packages.
    """

    def __init__(self, path: Sequence[str]) -> None:
        self._path = list(path)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module; ``path`` is the path of its package."""
        return PathFinder.find_spec(name, self._path if path is None else path, target)


def write_only_in(folder: Path) -> None:
    """Have this process raise a PermissionError if it creates or changes a file outside a folder.

    Flower makes the name of a folder from names that a run brings, which can contain "..".
    """
    inside = os.path.realpath(folder)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "os.mkdir" or (event == "open" and _is_for_writing(arguments[2]))
        if not writes or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        place = os.path.realpath(os.fsdecode(arguments[0]))
        if place != os.devnull and not Path(place).is_relative_to(inside):
            raise PermissionError(f"{place} is outside {inside}")

    sys.addaudithook(audit)


def _is_for_writing(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def serve(place: str) -> None:
    """Fork for each connection, which brings arguments, until the process ends."""
    (point,) = {*entry_points(group="console_scripts", name=NAME)}
    program = point.load()
    from . import messenger  # noqa: F401 (before the finder is changed, and once for all forks)

    sys.meta_path[sys.meta_path.index(PathFinder)] = InstalledFinder(sys.path)  # type: ignore[type-var]
    server = os.getpid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        listener.settimeout(_PAUSE)
        write_only_in(Path(os.environ["FLWR_HOME"]))
        while True:
            _end_after_failure()
            with suppress(TimeoutError):
                end, _ = listener.accept()
                with end:
                    arguments = b"".join(iter(lambda: end.recv(2**16), b""))  # noqa: B023
                if os.fork() == 0:
                    break
    end_with(server, interrupted=False)  # Flower would try to reach a SuperNode that is gone
    sys.argv = [NAME, *json.loads(arguments)]
    program()


def _end_after_failure() -> None:
    """End this process if a fork has failed: the SuperNode would wait for its reply forever."""
    with suppress(ChildProcessError):
        _, status = os.waitpid(-1, os.WNOHANG)
        if status:
            sys.exit("a message got no reply")


if __name__ == "__main__":
    end_with_parent()
    serve(sys.argv[1])
