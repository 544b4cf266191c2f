"""Send one message per client and round to workers on this machine.

Each worker has a share of the clients and one network. No process listens on an address: a worker inherits
its socket.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import torch

from .base import Message, Reply
from .codec import Header, Packet, decode, encode, packed_message, received
from .frames import ConnectionLost, receive, send

# messages for each worker that may be sent ahead of the next reply; this limits the memory of a round
_AHEAD = 4


class Worker:
    """The server's end of the pair of sockets with a worker, which has one packet at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._thread = end, ThreadPoolExecutor(1)

    def ask(self, packet: Packet) -> Future[bytearray]:
        """Send a packet after the replies to earlier ones, and return the frame of its reply.

        If the worker has ended, the future raises :exc:`.frames.ConnectionLost`.
        """
        return self._thread.submit(self._exchange, encode(packet))

    def _exchange(self, frame: bytearray) -> bytearray:
        send(self._end, None, frame)
        return receive(self._end)[1]

    def close(self) -> None:
        """Close the connection to a worker that has ended."""
        self._thread.shutdown(cancel_futures=True)
        self._end.close()


class DistributedEngine:
    """Carry messages to clients on workers.

    Each client belongs to one worker, so a worker reads only the images of its own clients. If the last
    message to a worker had a tensor under the same name, such as the model, the tensor is not sent to this
    worker again.

    Args:
        workers: reply to the messages.
        clients: all names.
        header: the facts that a worker needs for a client's work, sent with every message.
        started: called with the client's name as its message is sent.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        clients: Iterable[str],
        header: Header,
        started: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._header, self._started, self._ahead = header, started, _AHEAD * len(workers)
        self._worker = {name: workers[i % len(workers)] for i, name in enumerate(sorted(clients))}
        self._sent: dict[Worker, dict[str, tuple[torch.Tensor, int]]] = {}
        """the tensors of the last message to each worker in this round, and the version of each"""

    def clients(self) -> list[str]:
        """Return the names of the clients, sorted."""
        return list(self._worker)

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Yield the replies by name, and after the deadline an error for each missing one."""
        end = None if deadline is None else time.monotonic() + deadline
        names, awaited, self._sent = sorted(messages), dict[str, Future[bytearray]](), {}
        try:
            for i, name in enumerate(names):
                left = None if end is None else max(end - time.monotonic(), 0)
                for client in names[i : i + self._ahead] if left != 0 else ():
                    if client not in awaited:
                        awaited[client] = self._send(client, messages[client])
                if name in awaited and wait([awaited[name]], left).done:
                    yield received(decode(awaited.pop(name).result()), name)
                else:
                    yield Reply(name, error="deadline passed")
        finally:
            self._sent = {}
            for late in awaited.values():
                late.cancel()

    def _send(self, client: str, message: Message) -> Future[bytearray]:
        self._started(client)
        worker = self._worker[client]
        there = self._sent.get(worker, {})
        self._sent[worker] = {name: (tensor, tensor._version) for name, tensor in message.tensors.items()}
        new = {
            name: tensor
            for name, tensor in message.tensors.items()
            if name not in there or there[name][0] is not tensor or there[name][1] != tensor._version
        }
        header = self._header | {"client": client, "broadcast": list(message.tensors)}
        packet = packed_message(message, header)
        return worker.ask(Packet(packet.header, packet.groups | {"broadcast": new}))


def serve(end: socket.socket, program: Callable[[Packet], Packet]) -> None:
    """Run a worker: let a program, which must not raise, reply to the server until it ends."""
    kept: dict[str, torch.Tensor] = {}
    with suppress(ConnectionLost):
        while True:
            header, groups = decode(receive(end)[1])
            if "broadcast" in groups:
                there = kept | groups["broadcast"]
                kept = groups["broadcast"] = {name: there[name] for name in header["broadcast"]}
            send(end, None, encode(program(Packet(header, groups))))
