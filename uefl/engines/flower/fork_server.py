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

from .commands import end_with, end_with_parent

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
    """Find modules in fixed folders; later changes of ``sys.path`` have no effect.

    Args:
        path: the folders of installed packages.
    """

    def __init__(self, path: Sequence[str]) -> None:
        self._path = list(path)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module. ``path`` is the path of its package, None for a top-level module."""
        return PathFinder.find_spec(name, self._path if path is None else path, target)


def write_only_in(folder: Path) -> None:
    """Let this process open files for writing, and make folders, only in ``folder``.

    Otherwise the call raises PermissionError. Other changes, such as deleting a file, are not checked.

    Flower builds the name of a folder from names in the files of a run, and these can contain "..".
    """
    allowed = os.path.realpath(folder)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "os.mkdir" or (event == "open" and _is_for_writing(arguments[2]))
        if not writes or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        place = os.path.realpath(os.fsdecode(arguments[0]))
        if place != os.devnull and not Path(place).is_relative_to(allowed):
            raise PermissionError(f"cannot write {place}: it is outside {allowed}")

    sys.addaudithook(audit)


def _is_for_writing(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def serve(place: str) -> None:
    """Fork for each connection, until the process ends.

    A connection sends the arguments of one ``flwr-clientapp``, and the fork runs it.
    """
    (point,) = {*entry_points(group="console_scripts", name=NAME)}
    program = point.load()
    from . import messenger  # noqa: F401 (before the finder changes; all forks share it)

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
                connection, _ = listener.accept()
                with connection:
                    arguments = b"".join(iter(lambda: connection.recv(2**16), b""))  # noqa: B023
                if os.fork() == 0:
                    break
    end_with(server, interrupted=False)  # at SIGINT, Flower would try to reach a SuperNode that has ended
    sys.argv = [NAME, *json.loads(arguments)]
    program()


def _end_after_failure() -> None:
    """End this process if a fork has failed. Otherwise the SuperNode would wait for the reply forever."""
    with suppress(ChildProcessError):
        _, status = os.waitpid(-1, os.WNOHANG)
        if status:
            sys.exit(f"a fork of {NAME} failed with status {status}, so its message has no reply")


if __name__ == "__main__":
    end_with_parent()
    serve(sys.argv[1])
