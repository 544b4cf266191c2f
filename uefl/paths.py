"""Check the paths that a user gives, and read regular files.

A check raises an error of one sentence, before the file is read or written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from .errors import UnusableFile, UserError

_GROUP = Path("/sys/fs/cgroup/memory.max")
_LONGEST = 255  # bytes of a name, on all usual file systems
_LONGEST_PATH = 4095  # bytes of a path, on Linux
_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder for a leading ``~``, which a shell leaves in ``--out=~/runs``.

    Raises:
        UserError: no path, or an empty one, which would be the current folder.
    """
    if not isinstance(path, (str, os.PathLike)) or path == "":
        raise UserError(f"expected the path of a file or folder; got {path!r}")
    return Path(os.path.expanduser(path))


def resolved(path: Path) -> Path:
    """Return an absolute path without links, except for a loop of links, for which ``resolve`` raises."""
    return Path(os.path.realpath(path))


def command(*words: object) -> str:
    """Return a command of ``uefl`` for a shell, with quotes around paths that need them."""
    return "uefl " + shlex.join(map(str, words))


def check_name(path: Path, what: str) -> None:
    """Refuse a path that the files of a run cannot store as text, or that no file system allows.

    Raises:
        UserError: the path is not UTF-8, or Python reads names in another encoding; a part of the path is
            longer than file systems allow, or has a null byte.
    """
    longest = max(path.parts, key=_size, default="")
    if _size(longest) > _LONGEST or "\0" in str(path):
        limit = f"at most {_LONGEST} bytes, without a null byte"
        raise UserError(f"{what} {longest[:20]!r}...: expected a name of {limit}; rename it")
    if _size(str(path)) > _LONGEST_PATH:
        raise UserError(f"{what} {str(path)[:20]!r}...: expected a path of at most {_LONGEST_PATH} bytes")
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        name = os.fsencode(path)
    else:
        return
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{what} {name!r}: the name is not UTF-8; rename it") from None
    encoding = sys.getfilesystemencoding()
    raise UserError(
        f"{what} {name!r}: in this locale Python reads names as {encoding}; set PYTHONUTF8=1 in the"
        " environment"
    )


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def neighbor(path: Path, suffix: str) -> Path:
    """Return the path with a suffix added to the name, or to a hash of a name that is too long."""
    name = path.name + suffix
    if len(os.fsencode(name)) > _LONGEST:
        name = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32] + suffix
    return path.with_name(name)


def special(path: Path) -> str | None:
    """Return the kind, such as ``a pipe``, of a path that may block a process that opens it, or None."""
    try:
        return _SPECIAL.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None


def _other_kind(path: Path) -> str | None:
    return special(path) or ("a folder" if path.is_dir() else None)


def check_place(path: Path) -> None:
    """Refuse a path of a file to write that is a folder, or whose folder does not exist.

    Raises:
        UserError: see above.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}")


def check_file(path: Path, what: str, expected: str = "expected a file") -> None:
    """Refuse a path that is not a regular file, in a message that begins with ``what``.

    Raises:
        UserError: there is no such file, or one in other capitals, which the message names; the path is a
            folder, a pipe, a socket or a device; or the name is not UTF-8.
    """
    check_name(path, what)
    kind = _other_kind(path)
    if kind is None and path.is_file():
        return
    found = f"is {kind}" if kind else f"does not exist{other_capitals(path)}"
    raise UserError(f"{what} {path} {found}; {expected}")


def check_regular(path: Path) -> None:
    """Refuse a path that exists and is not a regular file.

    Raises:
        UnusableFile: the path is a folder, a pipe, a socket or a device.
    """
    kind = _other_kind(path)
    if kind is not None:
        raise UnusableFile(errno.EINVAL, f"it is {kind}, and a file is expected", str(path))


def has_file(path: Path) -> bool:
    """Return True for a regular file, and False if the path is free.

    Raises:
        UnusableFile: the path is a folder, a pipe, a socket, a device or a broken link.
    """
    check_regular(path)
    if path.is_symlink() and not path.exists():
        raise UnusableFile(errno.ELOOP, "it is a link to a path that does not exist", str(path))
    return path.exists()


def opened(path: Path) -> BufferedReader:
    """Open a regular file to read it.

    Raises:
        FileNotFoundError: there is no such file.
        UnusableFile: the path is not a regular file, or the file cannot be opened.
    """
    check_regular(path)
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableFile(error.errno, error.strerror, str(path)) from None


def read_bytes(path: Path) -> bytes:
    """Read a regular file.

    Raises:
        FileNotFoundError, UnusableFile: as for :func:`opened`.
    """
    with opened(path) as file, named(path):
        return file.read()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a regular file of text.

    Raises:
        FileNotFoundError, UnusableFile: as for :func:`opened`.
        UnicodeDecodeError: the file has another encoding.
    """
    return read_bytes(path).decode(encoding)


def memory() -> int:
    """Return how many bytes the machine, the control group and the limits of this process allow."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        most = min(most, limit)
    with suppress(OSError, ValueError):  # "max" without a limit
        most = min(most, int(_GROUP.read_text()))
    return most


def check_fits(path: Path, size: float | None = None) -> None:
    """Refuse values, or a whole file, that need more memory than the process may use.

    Raises:
        UserError: the memory is too small.
    """
    size, most = path.stat().st_size if size is None else size, memory()
    if size > most:
        raise UserError(
            f"{path} takes {size / 1e9:.1f} GB, more than the memory of this process, {most / 1e9:.1f} GB"
        )


def other_capitals(path: Path) -> str:
    """Return `` (but NAME is)`` if the folder holds the name in other capitals, else an empty string."""
    try:
        names = sorted(
            entry.name for entry in path.parent.iterdir() if entry.name.casefold() == path.name.casefold()
        )
    except OSError:
        return ""
    return f" (but {names[0]} exists: use the same capitals)" if names and path.name not in names else ""


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the written path in an error of the system, also of a full disk or of a temporary file.

    Raises:
        OSError: the error that was raised inside, with ``path`` as its ``filename``.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and error.filename2 is None):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
