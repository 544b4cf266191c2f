"""The folder of a run: whose it is, and the lines of its metrics."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError
from .paths import check_name, named

Silos = dict[str, dict[str, str]]
"""by name, what a run knows of silos that are programs of their own: ``precision``, ``torch``, and the hash
of the ``key`` that the name belongs to, where there are keys"""

_BEGUN = frozenset(("run.lock", "manifest.json", "manifest.tmp", "made.json", "made.tmp", "config.tmp"))
"""what a start leaves that failed before config.toml was whole, as on a full disk; the next start writes them
again"""


@contextmanager
def lock(out: Path, name: str = "run.lock", advice: str = "choose another folder") -> Iterator[None]:
    """One process per folder of a run or of a suite; the lock goes with the process, however it ends.

    Args:
        out: the folder.
        name: of the file in it that is locked.
        advice: what else a user may do than wait.

    Raises:
        UserError: another process has it, or the folder cannot be written to.
    """
    try:
        opened = (out / name).open("w")
    except OSError as error:
        raise UserError(f"{out / name} cannot be written ({error.strerror}); {advice}") from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out} is in use by another process; wait for it to end, or {advice}") from None
        yield


def check_free(out: Path) -> None:
    """A new run needs a folder of its own.

    Raises:
        UserError: the folder holds a run or something else, or lies inside of a run folder.
    """
    check_name(out, "the run folder")
    if (out / "summary.json").is_file():
        raise UserError(
            f"{out} holds a finished run already; choose another folder with --out, or see that run again:"
            f" uefl report {out}"
        )
    if (out / "config.toml").exists():
        with lock(out):  # refuses a run that is going on
            raise UserError(
                f"{out} holds a run that has not finished; choose another folder with --out, or uefl train"
                f" --resume {out}"
            )
    for folder in out.resolve().parents:
        if (folder / "config.toml").is_file() and (folder / "metrics.jsonl").is_file():
            raise UserError(f"{out} lies inside of the run folder {folder}; choose another folder with --out")
    if out.exists() and (not out.is_dir() or any(path.name not in _BEGUN for path in out.iterdir())):
        raise UserError(f"{out} is in use by something that is no run; choose another folder with --out")


class Metrics:
    """``metrics.jsonl`` of a run folder, to which every round adds lines."""

    def __init__(self, out: Path) -> None:
        self._path = out / "metrics.jsonl"

    @property
    def bytes(self) -> int:
        """How long the file is."""
        return self._path.stat().st_size

    def lines(self) -> list[dict[str, Any]]:
        """All that has been written."""
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines, which are on the disk when this returns: the checkpoint that follows counts on them."""
        if not lines:
            return
        with named(self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def cut(self, size: int) -> None:
        """Drop the lines of a round that was measured but is in no checkpoint; what is left has ``size``
        bytes.

        Raises:
            UserError: the file is shorter than that, or damaged.
        """
        with named(self._path):
            self._path.touch()
        if self.bytes < size:
            raise UserError(
                f"{self._path} is shorter than when the checkpoint was written; restore it, or start a"
                " new run"
            )
        os.truncate(self._path, size)
        try:
            self.lines()
        except ValueError:
            raise UserError(f"{self._path} is damaged; restore it, or start a new run") from None


def read_silos(out: Path) -> Silos:
    """What ``silos.json`` of a run folder says; nothing where there is none.

    Raises:
        UserError: it is damaged.
    """
    path = out / "silos.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(value, str) for of in found.values() for value in of.values()):
            raise TypeError
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError):
        raise UserError(
            f"{path}, which says whose the names of the silos are, is damaged; restore it, or start a new run"
        ) from None
    return dict(found)
