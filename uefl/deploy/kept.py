"""What a silo keeps in a folder of its own, from one run to the next; the server sees none of it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ..errors import UserError

_LENGTH = 32  # bytes


class Kept:
    """The folder of a silo. Its owner alone may read it.

    Args:
        folder: is made where it is absent.

    Raises:
        UserError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.secret = _secret(folder / "secret")
        except OSError as error:
            raise UserError(f"--state: {folder} cannot be used ({error.strerror}); name a folder of this silo's own") from None


def _secret(path: Path) -> bytes:
    """Read the secret of a silo, or make it from the operating system's secure source."""
    if not path.exists():
        new = path.with_name(f"secret.{os.getpid()}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_LENGTH))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(new, path)  # of two processes that begin at once, one makes the secret
        except FileExistsError:
            pass
        finally:
            new.unlink()
    found = path.read_bytes()
    if len(found) != _LENGTH:
        raise UserError(f"{path}, the secret of this silo, is damaged; restore it, or remove it to have another one")
    return found
