"""Send one message per client and round to workers on this machine.

Each worker has a share of the clients and one network.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

import torch

from .. import faults
from ..base import Message, Reply
from ..codec import Header, Packet, packed_message, reply_of
from ..frames import ConnectionLost
from .worker_pool import WorkerPool, receive, send

# messages for each worker that may be sent ahead of the next reply; this limits the memory of a round
_AHEAD = 4
_PAUSE = 0.5  # seconds


class DistributedEngine:
    """Carry messages to clients on the workers of a pool.

    Each client belongs to one worker, so a worker reads only the images of its own clients.

    If the last message to a worker had a tensor under the same name, such as the model, the tensor is not
    sent to this worker again.

    Args:
        pool: the workers.
        clients: all names.
        header: the facts that a worker needs for a client's work, sent with every message.
        started: called with the client's name as its message is sent.
    """

    def __init__(
        self,
        pool: WorkerPool,
        clients: Iterable[str],
        header: Header,
        started: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._workers, self._header, self._started = pool, header, started
        self._rank = {name: pool.ranks[i % len(pool.ranks)] for i, name in enumerate(sorted(clients))}
        self._sent: dict[int, dict[str, tuple[torch.Tensor, int]]] = {}
        """by rank, the tensors of its last message in this round, and the version of each"""

    def clients(self) -> list[str]:
        """Return the names of the clients, sorted."""
        return list(self._rank)

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Yield the replies by name; past the deadline, an error for each that is missing.

        Raises:
            ConnectionLost: a worker has ended.
        """
        end = None if deadline is None else time.monotonic() + deadline
        names = sorted(messages)
        queues = {
            rank: deque(i for i, name in enumerate(names) if self._rank[name] == rank)
            for rank in self._workers.ranks
        }
        awaited: dict[int, str] = {}
        arrived: dict[str, Reply] = {}
        self._sent = {}
        for i, name in enumerate(names):
            while name not in arrived:
                left = _PAUSE if end is None else end - time.monotonic()
                if left <= 0:
                    arrived |= {
                        late: Reply(late, error="deadline passed")
                        for late in names[i:]
                        if late not in arrived
                    }
                    break
                for rank, queue in queues.items():
                    if queue and queue[0] < i + _AHEAD * len(queues) and self._workers.idle(rank):
                        client = names[queue.popleft()]
                        self._started(client)
                        awaited[self._send(rank, client, messages[client])] = client
                found = self._workers.reply(min(left, _PAUSE))
                # a number that is not awaited belongs to a late reply of an earlier round
                if found is not None and found[0] in awaited:
                    client = awaited.pop(found[0])
                    arrived[client] = self._reply(found[1], client)
            yield arrived.pop(name)
        self._sent = {}

    def _send(self, rank: int, client: str, message: Message) -> int:
        there = self._sent.get(rank, {})
        self._sent[rank] = {name: (tensor, tensor._version) for name, tensor in message.tensors.items()}
        new = {
            name: tensor for name, tensor in message.tensors.items() if not _is_there(tensor, there.get(name))
        }
        packet = packed_message(
            message, self._header | {"client": client, "broadcast": list(message.tensors)}
        )
        return self._workers.ask(rank, Packet(packet.header, packet.parts | {"broadcast": new}))

    def _reply(self, packet: Packet, name: str) -> Reply:
        reply = reply_of(packet)
        return reply if reply.error is None else Reply(name, error=faults.describe(reply.error))


def _is_there(tensor: torch.Tensor, sent: tuple[torch.Tensor, int] | None) -> bool:
    return sent is not None and sent[0] is tensor and sent[1] == tensor._version


def serve(end: socket.socket, program: Callable[[Packet], Packet]) -> None:
    """Run a worker: answer the packets of the server until it ends.

    Args:
        end: this worker's socket.
        program: must not raise.
    """
    kept: dict[str, torch.Tensor] = {}
    with suppress(ConnectionLost):
        while True:
            header, parts = receive(end)
            if "broadcast" in parts:
                there = kept | parts["broadcast"]
                kept = parts["broadcast"] = {name: there[name] for name in header["broadcast"]}
            send(end, program(Packet(header, parts)))
