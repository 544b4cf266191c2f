"""Keep the secret and the private states of a silo in its own folder.

The server never sees them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from ..checkpoint import write_json
from ..errors import UserError
from ..folder import in_turn
from ..json_text import parse_json
from ..paths import read_bytes, read_text, resolved
from ..privacy import draw_key
from ..server.private import StateFiles, Tensors

_NAME = re.compile("[0-9a-f]{32}")
# number of earlier rounds with kept states; the checkpoint of a resumed server is at most one round behind
_ROUNDS = 2


class SiloFolder:
    """The folder of a silo, which only its owner may read.

    Args:
        folder: created if it is absent.
        simulated: whether its client is simulated. Then it has no secret, and draws from the seed of a run.
    """

    def __init__(self, folder: Path, simulated: bool = False) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.secret = None if simulated else _secret(folder / "secret")
        except OSError as error:
            raise UserError(
                f"--state: {error.filename or folder} cannot be used ({error.strerror}); name a folder that"
                " only this silo uses"
            ) from None


def next_to(data: Path, suffix: str) -> Path:
    """Return the path next to a silo's data that has the same name and this suffix too."""
    return resolved(data).with_name(f"{resolved(data).name}.{suffix}")


class Refusal(UserError):
    """An error of a silo with its own code for the server."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class States:
    """Store the states of one client in one arm.

    Each state has a file, named after its content, and the number of its round.

    Args:
        folder: the silo's own folder; files are created in a folder inside.
        run: the identity of the run, the same for a resumed one.
        arm, client: the arm and the client of the states.
    """

    def __init__(self, folder: Path, run: str, arm: str, client: str) -> None:
        place = hashlib.sha256(json.dumps([run, arm, client]).encode()).hexdigest()[:32]
        self._folder, self._arm, self._client = folder / "states" / place, arm, client
        self._files = StateFiles(self._folder)

    def read(self, name: str) -> Tensors:
        """Read the state with a name, or raise Refusal if it does not exist or is damaged."""
        if not _NAME.fullmatch(name):
            raise Refusal("state", "a message names no state")
        try:
            return self._files.read(name, self._client)
        except UserError as error:
            raise Refusal("state", str(error)) from None

    def write(self, tensors: Mapping[str, torch.Tensor], before: str, round: int) -> str:
        """Write the state of a round to the disk, and return its name.

        The states of old rounds are removed, except the state ``before`` this one.
        """
        self._folder.parent.mkdir(mode=0o700, exist_ok=True)
        name = self._files.write(tensors, self._client, before or None)
        self._files.sync([name])
        rounds = self._rounds() | {name: round}
        old = {other for other, of in rounds.items() if of < round - _ROUNDS and other not in (name, before)}
        kept = {other: of for other, of in rounds.items() if other not in old}
        about = {"arm": self._arm, "client": self._client, "rounds": kept}
        write_json(self._folder / "about.json", about)
        for other in old:
            (self._folder / f"{other}.safetensors").unlink(missing_ok=True)
        return name

    def _rounds(self) -> dict[str, int]:
        try:
            return dict(parse_json(read_text(self._folder / "about.json"))["rounds"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # if the numbers of rounds cannot be read, all states are kept


def _secret(path: Path) -> bytes:
    """Read the secret of a silo, or draw it from the secure source of the operating system."""
    if not path.exists():
        with in_turn(path):  # if two processes start at the same time, both use the secret of the first
            if not path.exists():
                draw_key(path)
    found = read_bytes(path)
    if len(found) != 32:
        raise UserError(
            f"{path}, the secret of this silo, is damaged; restore it, or remove the file, and the silo"
            " makes a new secret"
        )
    return found
