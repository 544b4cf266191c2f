"""Private states of clients: one file each in the run folder, in memory only while a message is made.

A file is named after a hash of its client and content, so a file that a checkpoint names never changes. The
order is *write, sync, checkpoint, sweep*: a run killed at any moment has every file that its checkpoint
names. Other files are removed after the next checkpoint. A client in its initial state has no file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load, save

from .. import checkpoint
from ..errors import UserError
from ..lazy import Lazy
from ..paths import named, read_bytes

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm

Tensors = dict[str, torch.Tensor]


class StateFiles:
    """Store tensors in files named after their content.

    Args:
        folder: the folder, which is made with the first file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unsynced: set[str] = set()
        self._replaced: set[str] | None = None
        """files that were replaced since the last sweep; None: there was no sweep yet"""

    def write(self, tensors: Mapping[str, torch.Tensor], owner: str, before: str | None) -> str:
        """Write a file completely or not at all, unless it is ``before``, and return its name."""
        data = save(checkpoint.copies(tensors))
        name = _name(data, owner)
        if name == before:
            return name
        if not self._folder.exists():
            self._folder.mkdir()
            _fsync(self._folder.parent)
        temporary = self._folder / "new"
        temporary.unlink(missing_ok=True)  # a killed process may have left it
        temporary.write_bytes(data)
        with named(self._path(name)):
            os.replace(temporary, self._path(name))
        self._unsynced.add(name)
        if before is not None and self._replaced is not None:
            self._replaced.add(before)
        return name

    def read(self, name: str, owner: str) -> Tensors:
        """Return the tensors of a file, on the CPU.

        Raises:
            UserError: the file is missing, truncated or altered.
        """
        path = self._path(name)
        try:
            data = read_bytes(path)
        except FileNotFoundError:
            raise UserError(
                f"{path}, the private state of {owner}, is missing; restore it, or start again in another"
                " folder"
            ) from None
        if _name(data, owner) != name:
            raise UserError(
                f"{path}, the private state of {owner}, is truncated or altered; start again in another"
                " folder"
            )
        return load(data)

    def sync(self, named: Iterable[str]) -> None:
        """Flush the files that a checkpoint is about to name to disk."""
        for name in sorted(self._unsynced.intersection(named)):
            _fsync(self._path(name))
        if self._unsynced:
            _fsync(self._folder)
        self._unsynced.clear()

    def sweep(self, named: Iterable[str]) -> None:
        """Remove the files that the last checkpoint does not name.

        The first call lists the whole folder.
        """
        old = self._replaced
        if old is None:
            old = {path.stem for path in self._folder.glob("*.safetensors")}
        for name in old.difference(named):
            self._path(name).unlink(missing_ok=True)
        self._replaced = set()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"


class PrivateStates(Mapping[str, Tensors]):
    """Map each client's name to its private state in one model.

    Each access reads the file.

    Args:
        clients: names of the training clients, sorted.
        start: the private tensors of the network that every client begins with, on the device of the network.
        fresh: makes the other tensors that a client begins with.
    """

    def __init__(
        self,
        files: StateFiles,
        clients: Iterable[str],
        start: Tensors,
        fresh: Callable[[str], Tensors],
        device: torch.device,
    ):
        self._files, self._clients, self._device = files, dict.fromkeys(clients), device
        self.start, self.fresh = start, fresh
        self.named: dict[str, str] = {}
        """file of each client's state; a client in its initial state has none"""

    def __getitem__(self, client: str) -> Tensors:
        """Return the state of a client, on the device of the network."""
        if client not in self._clients:
            raise KeyError(client)
        if client not in self.named:
            return self.start | self.fresh(client)
        return {
            name: tensor.to(self._device)
            for name, tensor in self._files.read(self.named[client], client).items()
        }

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all clients."""
        return iter(self._clients)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._clients)

    def put(self, client: str, tensors: Tensors) -> None:
        """Replace the state of a client."""
        if tensors:
            self.named[client] = self._files.write(tensors, client, self.named.get(client))

    def mean(self, algorithm: Algorithm, trained: Sequence[str]) -> Tensors:
        """Return a state to measure the global model with, and for clients without a state.

        Private tensors of the network are the mean over the clients that have trained. Before the first
        round, they are the initial values. The algorithm's method ``private_mean`` makes the other tensors.
        """
        if not trained:
            return dict(self.start)
        totals = {name: torch.zeros_like(first, dtype=torch.float64) for name, first in self.start.items()}
        for client in trained if totals else ():
            state = self[client]
            for name, total in totals.items():
                total += state[name]
        own = algorithm.private_mean(
            Lazy(trained, lambda client: {k: t for k, t in self[client].items() if k not in self.start})
        )
        mean = {name: (total / len(trained)).to(self.start[name].dtype) for name, total in totals.items()}
        return mean | {name: tensor for name, tensor in own.items() if name in algorithm.private_predicts}


def _name(data: bytes, owner: str) -> str:
    """Return the file name, which depends on the client, so that a damaged file names its owner."""
    return hashlib.sha256(owner.encode() + b"\0" + data).hexdigest()[:32]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
