"""Messengers between Flower and the processes of ``uefl train`` and ``uefl silo``."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..faults import NOT_READ
from ..frames import ConnectionLost, receive, send
from . import GONE, LARGE, MESSAGE, SILO, TORN

_AT_ONCE = 8  # replies
_SLOW = 30.0  # seconds; a reply that takes longer does not delay others
_SLOW_OF_NODE = 3  # slow replies of a node after which the server reads no other reply of this node
_STACK = 2**19  # bytes of the stack of a thread
_NONCE = 16  # bytes
_ROOM = 2**28  # bytes for everything except replies
_COPIES = 4  # copies of a reply in memory: its parts, the message, and the frame twice
_PAUSES = (0.02, 0.5)  # seconds between two requests for a reply: at first, and after a long time
_STORED = "uefl"
_REASONS = {3: TORN, 5: GONE}
"""by Flower's error code"""


def passed_on(message: Message) -> Message:
    """Return the reply of ``uefl silo`` to a message."""
    try:
        with connected(SILO) as end:
            send(end, None, readable(message))
            _, frame = receive(end)
    except OSError:  # no reply, so that the server asks the next process of the silo
        sys.exit("the process of the silo has ended")
    return reply_with(frame, message)


def readable(message: Message) -> bytes:
    """Return the frame of a message, or an empty frame for a message that uefl did not send.

    No reader accepts an empty frame.
    """
    try:
        return frame_of(message.content, MESSAGE)
    except Exception:  # any run can send any records
        return b""


def records_of(frame: bytes | bytearray) -> RecordDict:
    """Return the records of a frame: one array of bytes, which Flower sends in parts."""
    return RecordDict({"frame": ArrayRecord({"frame": Array("uint8", (len(frame),), _STORED, bytes(frame))})})


def frame_of(records: RecordDict, most: int) -> bytes:
    """Undo :func:`records_of`. :func:`uefl.engines.codec.decode` checks the frame.

    Args:
        records: the content of a message, from an untrusted sender.
        most: the largest size of the frame in bytes.

    Raises:
        KeyError: there is no frame.
        MemoryError: the frame is larger.
    """
    frame: bytes = records.array_records["frame"]["frame"].data
    if len(frame) > most:
        raise MemoryError
    return frame


def reply_with(frame: bytes | bytearray, message: Message) -> Message:
    """Return a frame as the reply to a message."""
    reply = Message(records_of(frame), reply_to=message)
    # the reply expires with the message, even if the clock of this machine is wrong
    reply.metadata.created_at, reply.metadata.ttl = message.metadata.created_at, message.metadata.ttl
    return reply


class Messenger:
    """A messenger that sends the requests of a run to a Grid, and returns each reply as it arrives.

    Each reply is handled separately. Its content decides neither which message it belongs to nor whether
    other replies are read.

    Args:
        grid: the Grid of the run.
        end: the end of a connection to the process of the run.
        bounded: whether the replies limit the memory of this process.
    """

    def __init__(self, grid: Grid, end: socket.socket, bounded: bool = True) -> None:
        self._grid, self._end, self._bounded = grid, end, bounded
        self._used = _data_of_this_process()
        self._pulls: dict[str, Future[bytes | str | None] | None] = {}
        """by the number of a sent message, the pending request for its reply, if any"""
        self._sent: dict[str, tuple[int, int]] = {}
        """by number, the node and the largest size of the reply in bytes"""
        self._begun: dict[str, float] = {}
        """by number, when the pending request began"""
        self._slow: set[str] = set()
        """the numbers of requests that still use a thread of an earlier pool"""
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def work(self) -> None:
        """Pass on messages and replies until the run has ended.

        Raises:
            RuntimeError: the run has failed.
        """
        pause = _PAUSES[0]
        if self._bounded:
            threading.stack_size(_STACK)  # a slow request keeps three threads of Flower's
        try:
            while True:
                if wait([self._end], pause):
                    try:
                        header, frame = receive(self._end)
                    except ConnectionLost:
                        return
                    send(self._end, {"done": self._do(header, frame)})
                    pause = _PAUSES[0]
                pause = _PAUSES[0] if self._send_replies() else min(1.5 * pause, _PAUSES[1])
                self._request_replies()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _request_replies(self) -> None:
        """Request each reply that has no pending request.

        A silo can announce a reply and send its parts for hours, and Flower waits for them inside the
        request. So slow requests keep their threads, and other requests get new threads. A node with
        _SLOW_OF_NODE slow requests gets no further one.
        """
        past = time.monotonic() - _SLOW
        slow = {number for number, begun in list(self._begun.items()) if begun < past}
        if len(slow - self._slow) >= _AT_ONCE // 2:
            self._slow |= slow
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = ThreadPoolExecutor(_AT_ONCE)
            self._limit_memory()
        busy = Counter(self._sent[number][0] for number in slow)
        for number, pull in self._pulls.items():
            if (pull is None or pull.cancelled()) and busy[self._sent[number][0]] < _SLOW_OF_NODE:
                self._pulls[number] = self._pool.submit(self._pull, number)

    def _do(self, header: dict[str, Any], frame: bytearray) -> Any:
        if header["do"] == "fail":
            raise RuntimeError("the run has failed")
        if header["do"] == "nodes":
            return [
                [info.node_id, info.last_activated_at, info.public_key.hex()]
                for info in self._grid.get_nodes()
            ]
        self._most = header["most"]
        self._limit_memory()
        records = records_of(frame)
        # Flower takes a reply from every node that names the message and its receiver. The name of a message
        # is a hash of its content, which other silos could guess.
        records["nonce"] = ConfigRecord({"nonce": secrets.token_bytes(_NONCE)})
        message = Message(records, header["node"], "train", ttl=header["life"])
        (number,) = self._grid.push_messages([message])
        if number:
            self._pulls[number], self._sent[number] = None, (header["node"], header["most"])
        return number or None

    def _limit_memory(self) -> None:
        """Limit the memory of this process to the largest replies that are read at the same time."""
        if self._bounded:
            limit = self._used + _ROOM + _COPIES * (_AT_ONCE + len(self._slow)) * self._most
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    def _send_replies(self) -> bool:
        """Send the replies that have come, and return whether there was one."""
        some = False
        for number, pull in list(self._pulls.items()):
            if pull is not None and pull.done() and not pull.cancelled():
                found = pull.result()
                if found is None:
                    self._pulls[number] = None
                    continue
                del self._pulls[number], self._sent[number]
                self._slow.discard(number)
                error, frame = (found, b"") if isinstance(found, str) else (None, found)
                send(self._end, {"reply_to": number, "error": error}, frame)
                some = True
        return some

    def _pull(self, number: str) -> bytes | str | None:
        """Return the reply to a message, or the reason why it has none, or None while both are unknown."""
        self._begun[number] = time.monotonic()
        try:
            reply = next(iter(self._grid.pull_messages([number])), None)
            if reply is None:
                return None
            if reply.has_error():
                code = reply.error.code
                return _REASONS.get(code, f"no reply (Flower's error {code})")
            return frame_of(reply.content, self._sent[number][1])
        except MemoryError:
            return LARGE
        except Exception as error:  # a silo can make Flower raise any error
            # an error of the network, by its package: Flower's exceptions are private
            if type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "grpc"):
                raise
            return NOT_READ
        finally:
            del self._begun[number]


def connected(name: str) -> socket.socket:
    """Return a connection to the socket that a variable of the environment names."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(os.environ[name])
    return end


def _data_of_this_process() -> int:
    """Return the size of this process in bytes, as ``RLIMIT_DATA`` counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(size) * 1024
