"""All clients in this process, on one device and one resident model: one after the other, or in groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from .base import Message, Reply


class Group(Protocol):
    """Run the turns of several clients at once."""

    size: int
    """largest number of clients"""

    def __call__(self, messages: Mapping[str, Message]) -> Iterator[Reply]:
        """Yield one reply for each client, in the order of ``messages``."""
        ...


class LocalEngine:
    """A client does its work when the iterator of replies reaches it.

    Args:
        clients: the function that does the work of each client, by name. If it raises a RuntimeError (out
            of memory, values that are not finite), the reply of this client is an error and the round goes
            on. Any other exception is a mistake in the program and ends the run.
        started: called with the client's name as its work begins.
        group: runs the turns of several clients at once; None: one client after the other.
    """

    def __init__(
        self,
        clients: Mapping[str, Callable[[Message], Reply]],
        started: Callable[[str], None] = lambda name: None,
        group: Group | None = None,
    ) -> None:
        self._clients, self._started, self._group = clients, started, group

    def clients(self) -> list[str]:
        """Return the sorted names of the clients."""
        return sorted(self._clients)

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Yield the replies by name, and after the deadline errors without starting the other clients."""
        end = math.inf if deadline is None else time.monotonic() + deadline
        names, size = sorted(messages), 1 if self._group is None else self._group.size
        for first in range(0, len(names), size):
            some = names[first : first + size]
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
