"""The app of a run, for Flower's programs: a messenger between a Grid and the process of ``uefl train``."""

from __future__ import annotations

import json
import os
import resource
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ..codec import Packet, Tensors
from ..distributed.worker_pool import ConnectionLost, receive, send
from .link import GONE, LARGE, RUN, TORN, UNREADABLE
from .records import pack, unpack

server = ServerApp()
client = ClientApp()

_AT_ONCE = 8  # replies
_ROOM = 2**28  # bytes for everything except replies
_COPIES = 4  # of a reply in memory: its parts, the message, the packet, and the frame of it
_PAUSES = (0.02, 0.5)  # seconds between two requests for a reply: at first, and after a long time
_REASONS = {3: TORN, 5: GONE}
"""by Flower's error code"""


@server.main()  # type: ignore[untyped-decorator]
def _serve(grid: Grid, context: Context) -> None:
    end = socket.socket(socket.AF_UNIX)
    end.connect(os.environ[RUN])
    Messenger(grid, end).work()


class Messenger:
    """A messenger that sends the requests of a run to a Grid, and returns each reply as it arrives.

    Each reply is handled separately. Its content decides neither which message it answers nor whether other
    replies are read.

    Args:
        grid: the Grid of the run.
        end: the end of a connection to the process of the run.
    """

    def __init__(self, grid: Grid, end: socket.socket) -> None:
        self._grid, self._end = grid, end
        self._used = _data_of_this_process()
        self._pulls: dict[str, Future[Packet | None] | None] = {}
        """by the number of a sent message, the pending request for its reply, if any"""
        self._most: dict[str, int] = {}
        """by number, the largest size of the reply in bytes"""

    def work(self) -> None:
        """Pass on messages and replies until the run has ended.

        Raises:
            RuntimeError: if the run has failed.
        """
        pause = _PAUSES[0]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while True:
                if wait([self._end], pause):
                    try:
                        header, parts = receive(self._end)
                    except ConnectionLost:
                        return
                    pause = _PAUSES[0]
                    self._do(header, parts)
                pause = _PAUSES[0] if self._send_replies() else min(1.5 * pause, _PAUSES[1])
                for number, pull in self._pulls.items():
                    if pull is None:
                        self._pulls[number] = pool.submit(self._pull, number)

    def _do(self, header: dict[str, Any], parts: dict[str, Tensors]) -> None:
        if header["do"] == "fail":
            raise RuntimeError("the run has failed")
        if header["do"] == "nodes":
            nodes = [
                [info.node_id, info.last_activated_at, info.public_key.hex()]
                for info in self._grid.get_nodes()
            ]
            return send(self._end, Packet({"done": nodes}, {}))
        limit = self._used + _ROOM + _COPIES * _AT_ONCE * header["most"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        message = Message(pack(Packet(header["content"], parts)), header["node"], "train", ttl=header["life"])
        (number,) = self._grid.push_messages([message])
        if number:
            self._pulls[number], self._most[number] = None, header["most"]
        send(self._end, Packet({"done": number or None}, {}))

    def _send_replies(self) -> bool:
        """Send the replies that have come; return whether there was one."""
        some = False
        for number, pull in list(self._pulls.items()):
            if pull is not None and pull.done():
                found = pull.result()
                if found is None:
                    self._pulls[number] = None
                else:
                    del self._pulls[number]
                    send(self._end, found)
                    some = True
        return some

    def _pull(self, number: str) -> Packet | None:
        """Return the reply to a message, an error in its place, or None as long as there is none."""
        try:
            sent = next(iter(self._grid.pull_messages([number])), None)
            if sent is None:
                return None
            if sent.has_error():
                code = sent.error.code
                return _error(number, _REASONS.get(code, f"no reply (Flower's error {code})"))
            packet = unpack(sent.content)
        except MemoryError:
            return _error(number, LARGE)
        except Exception as error:  # a silo can make Flower raise any
            if _is_of_the_network(error):
                raise
            return _error(number, UNREADABLE)
        if _size(packet) > self._most[number]:
            return _error(number, LARGE)
        return Packet({"reply_to": number, "content": packet.header}, packet.parts)


def _error(number: str, reason: str) -> Packet:
    return Packet({"reply_to": number, "error": reason}, {})


def _size(packet: Packet) -> int:
    tensors = [tensor for part in packet.parts.values() for tensor in part.values()]
    return len(json.dumps(packet.header)) + sum(tensor.nbytes for tensor in tensors)


def _is_of_the_network(error: Exception) -> bool:
    """Return whether an error comes from the network, by its package: Flower's exceptions are private."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "grpc")


def _data_of_this_process() -> int:
    """Return the size of this process in bytes, as ``RLIMIT_DATA`` counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(size) * 1024
