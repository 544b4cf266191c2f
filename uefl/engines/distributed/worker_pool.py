"""Exchange packets between the server and its workers, over a pair of sockets for each worker.

No process listens on an address, so no other process can connect.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from multiprocessing.connection import wait

from .. import frames
from ..codec import Packet, decode, encode


def send(end: socket.socket, packet: Packet) -> None:
    """Send a packet.

    Raises:
        ConnectionLost: the process at the other end has ended.
    """
    frames.send(end, None, encode(packet))


def receive(end: socket.socket) -> Packet:
    """Wait for the next packet.

    Raises:
        ConnectionLost: the process at the other end has ended.
        Unreadable: the bytes are not a packet.
    """
    _, body = frames.receive(end)
    return decode(body)


class WorkerPool:
    """Send packets to the workers and receive their replies. Each worker has one packet at a time.

    Args:
        ends: the server's end of each worker's pair of sockets.
    """

    def __init__(self, ends: Sequence[socket.socket]) -> None:
        self._ends = dict(enumerate(ends, 1))
        self.ranks = range(1, len(ends) + 1)
        self._busy: dict[int, int] = {}
        """by rank, the number of the packet that the worker has"""
        self._number = 0

    def idle(self, rank: int) -> bool:
        """Return whether a worker waits for a packet."""
        return rank not in self._busy

    def ask(self, rank: int, packet: Packet) -> int:
        """Send a packet to an idle worker; return the number of its reply.

        Raises:
            ConnectionLost: the worker has ended.
        """
        self._number += 1
        self._busy[rank] = self._number
        send(self._ends[rank], packet)
        return self._number

    def reply(self, seconds: float) -> tuple[int, Packet] | None:
        """Return the next reply of any worker with its number; None if none comes in time.

        Raises:
            ConnectionLost: a worker has ended.
            Unreadable: the bytes are not a packet.
        """
        ready = wait(list(self._ends.values()), timeout=seconds)
        for rank, end in self._ends.items():
            if end in ready:
                packet = receive(end)
                return self._busy.pop(rank), packet
        return None

    def close(self) -> None:
        """Close the connections, which ends workers that wait for a packet."""
        for end in self._ends.values():
            end.close()
