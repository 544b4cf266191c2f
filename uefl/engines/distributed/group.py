"""A group of processes on this machine, rank 0 of which is the server: packets go between it and each worker,
and nowhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from ..codec import Packet, decode, encode

# for all processes to find each other, and for one that waits for a packet to take it
_MEET = timedelta(seconds=120)
_EVER = timedelta(days=1000)  # a client's work may take any time; a process that ends is seen at once


class Lost(ConnectionError):
    """The process at the other end has ended."""


class Group:
    """Processes on this machine that have found each other; torch's default group is left to others.

    Args:
        folder: in which they leave their addresses for each other; only this user may read it.
        rank: of this process, 0 is the server.
        size: of the group.
        check: is called while others are not there yet; raises where one never will be.

    Raises:
        Lost: others do not come.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, check: Callable[[], object] = lambda: None
    ) -> None:
        # gloo would take the interface that the name of this machine leads to
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(folder / "addresses"), size)  # type: ignore[attr-defined]
        store.set(f"here-{rank}", "")
        end = time.monotonic() + _MEET.total_seconds()
        while not store.check([f"here-{other}" for other in range(size)]):
            check()
            if time.monotonic() > end:
                raise Lost("not all workers have started")
            time.sleep(0.05)
        try:
            self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, _MEET)
        except RuntimeError as error:
            raise Lost(str(error).partition("\n")[0]) from None

    def send(self, packet: Packet, rank: int) -> None:
        """Return when a process that waits for a packet has it.

        Raises:
            Lost: it has ended.
        """
        frame = encode(packet)
        try:
            for tensor in (torch.tensor([len(frame)]), frame):
                self._gloo.send([tensor], rank, 0).wait()
        except RuntimeError:
            raise Lost(f"process {rank} has ended") from None

    def receive(self, rank: int) -> Packet:
        """Wait for the next packet of a process.

        Raises:
            Lost: it has ended.
            Unreadable: what came is no packet.
        """
        length = torch.zeros(1, dtype=torch.int64)
        try:
            self._gloo.recv([length], rank, 0).wait(_EVER)
            frame = torch.empty(int(length), dtype=torch.uint8)
            self._gloo.recv([frame], rank, 0).wait(_EVER)
        except RuntimeError:
            raise Lost(f"process {rank} has ended") from None
        return decode(frame)


class Crew:
    """The workers, as the server sees them: each has one packet at a time.

    Args:
        group: whose rank 0 this process is.
        size: how many workers there are; their ranks begin with 1.
    """

    def __init__(self, group: Group, size: int) -> None:
        self._group = group
        self.ranks = range(1, size + 1)
        self._busy: dict[int, int] = {}
        """by rank, the number of the packet that it works on"""
        self._number = 0
        self._came: SimpleQueue[tuple[int, Packet | Exception]] = SimpleQueue()
        self._listeners = [Thread(target=self._listen, args=(rank,), daemon=True) for rank in self.ranks]
        for listener in self._listeners:
            listener.start()

    def idle(self, rank: int) -> bool:
        """Whether a worker waits for a packet."""
        return rank not in self._busy

    def ask(self, rank: int, packet: Packet) -> int:
        """Give a packet to an idle worker; the number under which its answer comes."""
        self._number += 1
        self._busy[rank] = self._number
        self._group.send(packet, rank)
        return self._number

    def answer(self, seconds: float) -> tuple[int, Packet] | None:
        """The next answer of any worker, with the number of what it answers; None: there is none yet.

        Raises:
            Lost: a worker has ended.
            Unreadable: what it sent is no packet.
        """
        try:
            rank, found = self._came.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return self._busy.pop(rank), found

    def close(self) -> None:
        """The workers have ended: wait for the threads that listen to them."""
        for listener in self._listeners:
            listener.join()

    def _listen(self, rank: int) -> None:
        try:
            while True:
                self._came.put((rank, self._group.receive(rank)))
        except Exception as error:
            self._came.put((rank, error))
