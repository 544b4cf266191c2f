"""All clients in this process, one after the other, on one device and one resident model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from .base import Message, Reply


class LocalEngine:
    """Runs each client's work when its reply is asked for.

    Args:
        clients: the work of each client by name. A RuntimeError in it (out of memory, a codebook that is not finite) costs this
            client's reply and nothing else; any other exception is a mistake in the program and ends the run.
        started: called with the client's name as its work begins.
    """

    def __init__(self, clients: Mapping[str, Callable[[Message], Reply]], started: Callable[[str], None] = lambda name: None) -> None:
        self._clients = dict(clients)
        self._started = started

    def clients(self) -> list[str]:
        """Names of the clients, sorted."""
        return sorted(self._clients)

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Yield the replies by name; past the deadline the remaining clients are not started."""
        end = time.monotonic() + deadline if deadline is not None else None
        for name in sorted(messages):
            if end is not None and time.monotonic() > end:
                yield Reply(name, error="deadline passed")
                continue
            self._started(name)
            try:
                reply = self._clients[name](messages[name])
            except RuntimeError as error:  # out of memory, a codebook that is not finite: this client's, not the run's
                lines = str(error).splitlines()
                reply = Reply(name, error=lines[0] if lines else type(error).__name__)
            yield reply
