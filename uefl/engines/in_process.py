"""All clients in this process, one after the other, on one device and one resident model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from .base import Message, Reply


class LocalEngine:
    """A client does its work when the iterator of replies reaches it.

    Args:
        clients: the function that does the work of each client, by name. If it raises a RuntimeError (out
            of memory, values that are not finite), the reply of this client is an error and the round goes
            on. Any other exception is a mistake in the program and ends the run.
        started: called with the client's name as its work begins.
    """

    def __init__(
        self,
        clients: Mapping[str, Callable[[Message], Reply]],
        started: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._clients = clients
        self._started = started

    def clients(self) -> list[str]:
        """Return names of the clients, sorted."""
        return sorted(self._clients)

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Yield the replies by name; past the deadline the remaining clients are not started."""
        end = time.monotonic() + deadline if deadline is not None else None
        for name in sorted(messages):
            if end is not None and time.monotonic() > end:
                yield Reply(name, error="deadline passed")
                continue
            self._started(name)
            message = messages[name]
            try:
                reply = self._clients[name](message)
            except (
                RuntimeError
            ) as error:  # out of memory, values that are not finite: an error of this client, not of the run
                lines = str(error).splitlines()
                reply = Reply(name, error=lines[0] if lines else type(error).__name__)
            yield reply
