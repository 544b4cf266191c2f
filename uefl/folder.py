"""The folder of a run: its lock and its file of metrics."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .errors import UserError
from .json_text import parse_json
from .paths import (
    check_name,
    check_regular,
    command,
    has_file,
    named,
    neighbor,
    read_bytes,
    read_text,
    resolved,
    special,
)

Silos = dict[str, dict[str, str]]
"""facts by name of the silo: ``precision``, ``torch`` and, with keys, the hash of its ``key``"""

_BEGUN = frozenset(
    ("run.lock", "manifest.json", "manifest.json.tmp", "made.json", "made.json.tmp", "config.toml.tmp")
)
"""files that a failed start may leave; the next start overwrites them"""
_TRIES, _MOMENT = 5, 0.05
"""attempts to lock a file, and seconds between them"""


@contextmanager
def lock(out: Path, name: str = "run.lock", advice: str = "choose another folder") -> Iterator[None]:
    """Lock the folder of a run or a suite by a file, until the process ends.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written to; ``advice`` follows.
    """
    try:
        check_regular(out / name)
        file = (out / name).open("a")
    except OSError as error:
        raise UserError(f"{out / name} cannot be written ({error.strerror}); {advice}") from None
    with file:
        if not _locked(file):
            raise UserError(f"{out} is in use by another process; wait for it to end, or {advice}")
        yield


def _locked(file: IO[Any] | int) -> bool:
    """Lock a file unless another process holds the lock. :func:`check_free` holds it for a moment."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_MOMENT)
    return False


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make a folder and lock the folder itself, so that no lock file stays in it.

    Raises:
        UserError: another process holds the lock.
        OSError: the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _locked(descriptor):
            raise UserError(
                f"{folder} is in use by another process; wait for it to end, or choose another folder"
            )
        yield
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Keep other processes from writing a file at the same time.

    Raises:
        UserError: another process writes it, or its folder cannot be written to.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(in_turn(path, wait=False))
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror})") from None
        yield


@contextmanager
def in_turn(path: Path, wait: bool = True) -> Iterator[None]:
    """Let one process after the other write a file, by a lock on ``FILE.lock`` next to it.

    Raises:
        UserError: another process writes it, without ``wait``.
        OSError: the folder cannot be written to.
    """
    guard = neighbor(path, ".lock")
    while True:
        check_regular(guard)
        with guard.open("a") as file:
            if wait:
                fcntl.flock(file, fcntl.LOCK_EX)
            elif not _locked(file):
                raise UserError(
                    f"{path} is being written by another process; wait for it to end, or choose another file"
                )
            if not _is_at(file, guard):
                continue  # the last owner of the lock has removed the file
            try:
                yield
            finally:
                guard.unlink(missing_ok=True)
            return


def _is_at(file: IO[Any], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def check_free(out: Path) -> None:
    """Check that a new run can use a folder.

    Raises:
        UserError: the folder holds a run or other files, or lies inside a run folder.
    """
    check_name(out, "the run folder")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()  # all at one moment
    if "summary.json" in names:
        raise UserError(
            f"{out} holds a finished run; choose another folder with --out, or show that run:"
            f" {command('report', out)}"
        )
    if "config.toml" in names:
        with lock(out):  # a running run gets the error of the lock
            raise UserError(
                f"{out} holds an unfinished run; choose another folder with --out, or continue it:"
                f" {command('train', '--resume', out)}"
            )
    folder = run_around(out)
    if folder is not None:
        raise UserError(f"{out} lies inside the run folder {folder}; choose another folder with --out")
    if special(out):
        raise UserError(f"{out} is {special(out)}; choose another folder with --out")
    if names - _BEGUN or (out.exists() and not out.is_dir()):
        raise UserError(f"{out} is not empty and is not a run folder; choose another folder with --out")


def run_around(path: Path) -> Path | None:
    """Return the run folder that a path lies in, if there is one."""
    folders = resolved(path).parents
    whole = ("config.toml", "metrics.jsonl")
    return next((folder for folder in folders if all((folder / name).is_file() for name in whole)), None)


def check_no_file_of_a_run(path: Path) -> None:
    """Refuse to write a file among the files of a run, except a .csv, .pt2 or .onnx.

    Raises:
        UserError: the file lies in a run folder and has another suffix.
    """
    run = run_around(path)
    if run is not None and path.suffix.lower() not in (".csv", ".pt2", ".onnx"):
        raise UserError(f"{path} would be among the files of the run {run}; choose another folder")


class MetricsFile:
    """``metrics.jsonl`` of a run folder: a line per arm, round and client."""

    def __init__(self, out: Path) -> None:
        self._path = out / "metrics.jsonl"

    @property
    def bytes(self) -> int:
        """Return the size of the file."""
        return self._path.stat().st_size

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines, with rounds counted from 1."""
        return [parse_json(line) for line in read_text(self._path).splitlines()]

    def check_new(self, arm: str) -> None:
        """Check that no results are lost if a run has no checkpoint, after at most a round of its first arm.

        Raises:
            UserError: there are lines of other rounds.
        """
        if not self._path.exists():
            return
        for text in read_bytes(self._path).decode(errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a killed process may leave a part of a line
                line = parse_json(text)
                if (line["arm"], line["round"]) != (arm, 1):
                    lost = f"{self._path} has rounds, and checkpoint.json is missing"
                    raise UserError(f"{lost}; restore it, or start a new run")

    def write(self, lines: Sequence[Mapping[str, Any]], first: int = 0) -> None:
        """Append lines with rounds from ``first``, and wait until they are on the disk."""
        if not lines:
            return
        with named(self._path), self._path.open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps({**line, "round": line["round"] + 1 - first}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def cut(self, size: int) -> None:
        """Truncate the file to ``size`` bytes, to drop rounds that no checkpoint has.

        Raises:
            UserError: the file is shorter than ``size``, or damaged.
        """
        if (self.bytes if has_file(self._path) else 0) < size:
            raise UserError(
                f"{self._path} is shorter than when the checkpoint was written; restore it, or start a"
                " new run"
            )
        with named(self._path):
            self._path.touch()
            os.truncate(self._path, size)
        try:
            self.lines()
        except ValueError:
            raise UserError(f"{self._path} is damaged; restore it, or start a new run") from None


def read_silos(out: Path) -> Silos:
    """Return the content of ``silos.json`` of a run folder, or an empty mapping without this file.

    Raises:
        UserError: the file is damaged.
    """
    path = out / "silos.json"
    try:
        found = parse_json(read_text(path))
        if not all(isinstance(value, str) for of in found.values() for value in of.values()):
            raise TypeError
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError):
        raise UserError(
            f"{path}, the register of the silos, is damaged; restore it, or start a new run"
        ) from None
    return dict(found)
