"""A flood of connections and requests at a SuperLink, from a client without a key."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_BODY = 2**25  # bytes of a request
_HEADERS = "POST /v1/fleet/push-object HTTP/1.1\r\nhost: there\r\ncontent-type: application/protobuf\r\n"


@contextmanager
def flood(port: int, connections: int, senders: int) -> Iterator[None]:
    """Keep connections open, each with half of a request, and send large requests, until the context ends."""
    ended = threading.Event()
    threads = [threading.Thread(target=_send, args=(port, ended)) for _ in range(senders)]
    with ExitStack() as stack:
        for thread in threads:
            thread.start()
        try:
            for _ in range(connections):
                with suppress(OSError):
                    end = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                    end.sendall(f"{_HEADERS}content-length: {_BODY}\r\n\r\n".encode())
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _send(port: int, ended: threading.Event) -> None:
    """Send one large request after the other."""
    request = f"{_HEADERS}content-length: {_BODY}\r\n\r\n".encode() + bytes(_BODY)
    while not ended.wait(0.1):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as end:
            end.sendall(request)
            end.recv(2**16)
