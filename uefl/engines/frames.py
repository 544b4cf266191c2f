"""Frames between processes of one machine over a socket: a header as JSON, then bytes."""

from __future__ import annotations

import json
import socket
from typing import Any

HEADER = 2**25
"""limit on the bytes of the JSON of a message or a reply; the names of 100,000 clients take a few million"""
_LENGTH = 8  # bytes of the length of the header, and of the length of the body


class ConnectionLost(ConnectionError):
    """The process at the other end has ended."""


def send(end: socket.socket, header: Any, body: bytes | bytearray | memoryview = b"") -> None:
    """Send a frame, or raise ConnectionLost."""
    text = json.dumps(header).encode()
    try:
        sizes = [len(part).to_bytes(_LENGTH, "little") for part in (text, body)]
        end.sendall(b"".join([*sizes, text]))
        if len(body) > 0:  # the other process may have ended after a reply without reading the body
            end.sendall(body)
    except OSError as error:
        raise ConnectionLost("a process has ended") from error


def receive(end: socket.socket) -> tuple[Any, bytearray]:
    """Wait for the next frame, or raise ConnectionLost."""
    sizes = _filled(end, 2 * _LENGTH)
    text = _filled(end, int.from_bytes(sizes[:_LENGTH], "little"))
    return json.loads(text), _filled(end, int.from_bytes(sizes[_LENGTH:], "little"))


def _filled(end: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    place = memoryview(data)
    try:
        while len(place):
            count = end.recv_into(place)
            if not count:
                raise ConnectionLost("a process has ended")
            place = place[count:]
    except ConnectionResetError as error:
        raise ConnectionLost("a process has ended") from error
    return data
