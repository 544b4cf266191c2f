"""The inputs of an algorithm's server half in one turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..engines.base import Message, Reply
from ..errors import RunError


@dataclass(frozen=True)
class Turn:
    """One exchange with the clients.

    They measure the model of the message, then the participants train it.
    """

    iteration: int
    trained: int
    """rounds of this iteration that have been trained"""
    round: int
    """rounds of the run that have been trained"""
    measure: bool
    train: bool
    participants: tuple[str, ...]
    """clients that train, sorted"""
    notice: Callable[[str], None]
    """function for a line to the user"""
    ask: Callable[[Mapping[str, Message]], Iterator[Reply]]
    """function that runs an exchange of the algorithm: each client's ``reply`` to its message, sorted by
    name. A rejected reply has an ``error``; it has been counted, recorded and reported"""

    def need(self, messages: Mapping[str, Message], what: str) -> Iterator[Reply]:
        """Ask clients and require every reply.

        ``what`` completes the error message.

        Raises:
            RunError: a reply was rejected.
        """
        for reply in self.ask(messages):
            if reply.error is not None:
                raise RunError(f"{reply.client} could not {what}: {reply.error}")
            yield reply
