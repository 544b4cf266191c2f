"""Messengers between Flower and the processes of ``uefl train`` and ``uefl silo``."""

from __future__ import annotations

import math
import os
import resource
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..faults import NOT_READ
from ..frames import ConnectionLost, receive, send
from . import BARRED, GONE, LARGE, MESSAGE, SILO, TORN

_AT_ONCE = 8  # replies
_SLOW = 30.0  # seconds; a reply that takes longer does not delay others
_SLOW_OF_NODE = 3  # slow replies of a node after which the server reads no other reply of this node
_INVALID = 4  # replies of a node in a row that cannot be read, after which the server asks it no more
_MOMENT = 2.0  # most seconds for which a message, or another reply, waits until a reply has been read
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
    """Undo :func:`records_of` for an untrusted message. :func:`uefl.engines.codec.decode` checks the frame.

    Raises:
        KeyError: there is no frame.
        MemoryError: the frame has more than ``most`` bytes.
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


@dataclass
class _Awaited:
    """A message that has been sent, and the request for its reply."""

    node: int
    most: int
    """largest size of the reply in bytes"""
    pull: Future[bytes | str | None] | None = None
    """the pending request, if any"""
    begun: float = math.inf
    """when a thread began the pending request"""
    apart: bool = False
    """whether the request uses a thread of an earlier pool"""
    forgotten: bool = False
    """whether no one waits for the reply any more"""

    @property
    def slow(self) -> bool:
        """Return whether the request takes so long that other requests do not wait for it."""
        return self.begun < time.monotonic() - _SLOW

    @property
    def new(self) -> bool:
        """Return whether other requests wait for the pending request."""
        return self.begun > time.monotonic() - _MOMENT


class Messenger:
    """Sends the requests of a run, which come from ``end``, to a Grid, and returns each reply as it arrives.

    Each reply is handled separately. Its content decides neither which message it belongs to nor whether
    other replies are read. A reply that fills the memory can damage the replies that arrive at the same time.
    So after a reply that cannot be read, all replies of its node are read alone. If _INVALID replies of a
    node in a row cannot be read, the node gets no further message.

    Args:
        bounded: whether the replies limit the memory of this process.
    """

    def __init__(self, grid: Grid, end: socket.socket, bounded: bool = True) -> None:
        self._grid, self._end, self._bounded = grid, end, bounded
        self._used = _data_of_this_process()
        self._awaited: dict[str, _Awaited] = {}
        """by the number of a message"""
        self._invalid = Counter[int]()
        """by node, the last replies in a row that could not be read; at least 1 after the first one"""
        self._alone = False
        """whether the next request is for a reply that is read alone"""
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
                    continue
                pause = _PAUSES[0] if self._send_replies() else min(1.5 * pause, _PAUSES[1])
                self._request_replies()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _request_replies(self) -> None:
        """Request each reply that has no pending request.

        A silo can announce a reply and send its parts for hours, and Flower waits for them inside the
        request. So slow requests keep their threads, and other requests get new threads. A node with
        _SLOW_OF_NODE slow requests gets no further one. A reply that is read alone waits for the others, and
        the others wait for it for a moment.
        """
        slow = [one for one in self._awaited.values() if one.slow]
        if sum(not one.apart for one in slow) >= _AT_ONCE // 2:
            for one in slow:
                one.apart = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = ThreadPoolExecutor(_AT_ONCE)
            self._limit_memory()
        busy = Counter(one.node for one in slow)
        free = [number for number, one in self._awaited.items() if one.pull is None or one.pull.cancelled()]
        free = [number for number in free if busy[self._awaited[number].node] < _SLOW_OF_NODE]
        alone = [number for number in free if self._invalid[self._awaited[number].node]]
        reading = self._reading()
        new = [one for one in reading if one.new]
        if any(self._invalid[one.node] for one in new) or (alone and self._alone and new):
            return
        if alone and self._alone and not reading:
            free, self._alone = alone[:1], False
            self._awaited[alone[0]] = self._awaited.pop(alone[0])  # the others come first the next time
        else:
            free, self._alone = [number for number in free if number not in alone], True
        for number in free:
            one = self._awaited[number]
            with suppress(RuntimeError):  # a reply has filled the memory, so no thread can start
                one.pull = self._pool.submit(self._pull, number, one)

    def _reading(self) -> list[_Awaited]:
        """Return the messages with a pending request that is not slow."""
        return [
            one
            for one in self._awaited.values()
            if one.pull is not None and not one.pull.done() and not one.slow
        ]

    def _do(self, header: dict[str, Any], frame: bytearray) -> Any:
        if header["do"] == "fail":
            raise RuntimeError("the run has failed")
        if header["do"] == "forget":
            for number in self._awaited.keys() & header["numbers"]:
                self._awaited[number].forgotten = True
            return None
        if header["do"] == "expect":  # a message comes, and a reply may have filled the memory
            futures.wait([one.pull for one in self._reading() if one.new and one.pull], _MOMENT)
            return self._limit_memory(header["most"])
        while True:
            try:
                if header["do"] == "push":
                    return self._push(header, frame)
                nodes = self._grid.get_nodes()
                return [[node.node_id, node.last_activated_at, node.public_key.hex()] for node in nodes]
            except Exception as error:
                if not _may_pass(error):
                    raise
            time.sleep(_PAUSES[1])

    def _push(self, header: dict[str, Any], frame: bytearray) -> str | None:
        """Send a message, and return its number, or None if its node does not exist."""
        about, nonce = _Awaited(header["node"], header["most"]), secrets.token_bytes(_NONCE)
        if self._invalid[about.node] >= _INVALID:
            about.pull = Future()
            about.pull.set_result(BARRED)
            self._awaited[nonce.hex()] = about
            return nonce.hex()
        records = records_of(frame)
        # Flower takes a reply from every node that names the message and its receiver. The name of a message
        # is a hash of its content, which other silos could guess.
        records["nonce"] = ConfigRecord({"nonce": nonce})
        message = Message(records, about.node, "train", ttl=header["life"])
        (number,) = self._grid.push_messages([message])
        if number:
            self._awaited[number] = about
            self._limit_memory()
        return number or None

    def _limit_memory(self, most: int = 0) -> None:
        """Limit the memory of this process to the largest replies that are read at the same time.

        ``most`` is the limit for the reply to the next message.
        """
        if self._bounded:
            most = max([most, *(one.most for one in self._awaited.values())])
            apart = sum(one.apart for one in self._awaited.values())
            limit = self._used + _ROOM + _COPIES * (_AT_ONCE + apart) * most
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    def _send_replies(self) -> bool:
        """Send the replies that have come, and return whether there was one."""
        some = False
        for number, one in list(self._awaited.items()):
            if one.pull is not None and one.pull.done() and not one.pull.cancelled():
                found, one.pull, one.apart = one.pull.result(), None, False
                if found in (LARGE, NOT_READ):
                    self._invalid[one.node] += 1
                elif isinstance(found, bytes) and self._invalid[one.node]:
                    self._invalid[one.node] = 1  # its next replies are still read alone
                if found is not None and not one.forgotten:
                    error, frame = (found, b"") if isinstance(found, str) else (None, found)
                    send(self._end, {"reply_to": number, "error": error}, frame)
                    some = one.forgotten = True
            if one.forgotten and (one.pull is None or one.pull.cancelled()):
                del self._awaited[number]
        return some

    def _pull(self, number: str, one: _Awaited) -> bytes | str | None:
        """Return the reply to a message, or the reason why it has none, or None while both are unknown."""
        one.begun = time.monotonic()
        try:
            reply = next(iter(self._grid.pull_messages([number])), None)
            if reply is None:
                return None
            if reply.has_error():
                code = reply.error.code
                return _REASONS.get(code, f"no reply (Flower's error {code})")
            return frame_of(reply.content, one.most)
        except MemoryError:
            return LARGE
        except Exception as error:  # a silo can make Flower raise any error
            if _may_pass(error):
                return None
            # an error of the network, by its package: Flower's exceptions are private
            if type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "grpc"):
                raise
            return NOT_READ
        finally:
            one.begun = math.inf


def _may_pass(error: Exception) -> bool:
    """Return whether the same request may succeed later.

    The SuperLink has failed (HTTP 500 and above), or a reply has filled the memory.
    """
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return isinstance(error, MemoryError) or status >= 500


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
