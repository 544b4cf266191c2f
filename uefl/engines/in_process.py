"""All clients in this process, on one device and one resident model: one after the other, or in groups."""

from __future__ import annotations

import math
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
        group: runs the turns of several clients at once, and yields a reply for each of its messages, in
            their order; None: one client after the other.
        size: largest number of clients of ``group``.
    """

    def __init__(
        self,
        clients: Mapping[str, Callable[[Message], Reply]],
        started: Callable[[str], None] = lambda name: None,
        group: Callable[[Mapping[str, Message]], Iterator[Reply]] | None = None,
        size: int = 1,
    ) -> None:
        self._clients, self._started, self._group, self._size = clients, started, group, size

    def clients(self) -> list[str]:
        """Return the sorted names of the clients."""
        return sorted(self._clients)

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Yield the replies by name, and after the deadline errors without starting the other clients."""
        end = math.inf if deadline is None else time.monotonic() + deadline
        names = sorted(messages)
        for first in range(0, len(names), self._size):
            some = names[first : first + self._size]
            if time.monotonic() > end:
                yield from (Reply(name, error="deadline passed") for name in some)
                continue
            for name in some:
                self._started(name)
            if self._group is not None:
                yield from self._group({name: messages[name] for name in some})
                continue
            (name,) = some
            try:
                reply = self._clients[name](messages[name])
            except RuntimeError as error:  # out of memory, values that are not finite: the run goes on
                reply = Reply.failed(name, error)
            yield reply
