"""Processes on this machine that end with this one, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from . import faults

PARENT = "UEFL_PARENT"
"""names the parent of a process in its environment; the two end together"""
_GRACE = 5.0  # seconds between asking a process to end and ending it
_NEW = 60.0  # seconds; a younger temporary folder may not be locked yet


class Processes:
    """Start Python modules, each with a log file, and end all of them.

    A module calls :func:`end_with_parent`, so it ends even if this process is killed.

    Args:
        folder: folder of the logs.
        environment: additions to theirs.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.all: dict[str, subprocess.Popen[bytes]] = {}
        """by the name of the log"""
        self._environment = {"PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())} | environment

    def start(
        self, name: str, module: str, *arguments: str, inherited: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Run ``python -m MODULE ARGUMENTS...`` under a name, with these file descriptors open."""
        with self.log(name).open("ab") as log:
            # in a group of its own, because Ctrl-C is for the run, which then ends its processes in order
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment,
                start_new_session=True,
                pass_fds=inherited,
            )
        self.all[name] = process
        return process

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.folder / f"{name}.log"

    def ended(self, name: str) -> str | None:
        """Return the last log line or the signal of a process that has ended, or None while it runs."""
        code = self.all[name].poll()
        if code is None:
            return None
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        # without the boxes that Flower draws
        lines = [line.strip(" │╭╮╰╯─") for line in self.log(name).read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), f"exit code {code}")

    def end(self) -> None:
        """End every process, the last one first."""
        for process in reversed(self.all.values()):
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + _GRACE
        while any(process.poll() is None for process in self.all.values()) and time.monotonic() < end:
            time.sleep(0.02)
        for process in self.all.values():
            process.kill()  # this does nothing to a process that has ended
            process.wait()

    def stop(self, notice: Callable[[str], object], who: str) -> None:
        """End every process, and remove the folder, or say where the logs are if one has an error."""
        self.end()
        errors = (b"Traceback", faults.LINE.encode())
        if any(error in self.log(name).read_bytes() for name in self.all for error in errors):
            notice(f"the logs of the failed {who} are in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """Make a temporary folder for as long as the context lasts.

    Folders with this prefix that killed processes of this user have left are removed: each process holds a
    lock on its folder.
    """
    for left in Path(gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_unlocked(left)
    with TemporaryDirectory(prefix=prefix) as place:
        descriptor = os.open(place, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(place)
        finally:
            os.close(descriptor)


def _remove_unlocked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(descriptor)
        if about.st_uid == os.getuid() and time.time() - about.st_mtime > _NEW:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def end_with(parent: int, interrupted: bool = True) -> None:
    """End this process when its parent ends: by SIGINT, or else at once, whatever this process does."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        if not interrupted:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def end_with_parent(interrupted: bool = True) -> None:
    """End this process when the process of its :class:`Processes` ends, as :func:`end_with` does."""
    if (parent := os.environ.pop(PARENT, None)) is not None:  # its children have no such parent
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        end_with(int(parent), interrupted)
