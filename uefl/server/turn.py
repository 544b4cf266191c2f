"""What the server half of an algorithm may know of the turn that it is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..engines.base import Message, Reply
from ..errors import RunError


@dataclass(frozen=True)
class Turn:
    """One exchange with every client: they measure the model that they are sent, and the participants then
    train it."""

    iteration: int
    trained: int
    """rounds of this iteration that have been trained"""
    round: int
    """rounds of the run that have been trained"""
    measure: bool
    train: bool
    participants: tuple[str, ...]
    """clients that train, sorted; empty where nobody does"""
    notice: Callable[[str], None]
    """takes a line for the user"""
    exchange: Callable[[Mapping[str, Message]], Iterator[Reply]]
    leave_out: Callable[[str, str], None]
    """takes a client and a reason, where an answer that fits its message is of no use: it is counted,
    recorded and told to the user"""

    def ask(self, messages: Mapping[str, Message]) -> Iterator[Reply]:
        """One exchange of the algorithm's own: each named client's ``answer``, by name.

        A reply whose tensors are not those that its message expects has an ``error``; it is counted and
        recorded, and the user was told.
        """
        return self.exchange(messages)

    def need(self, messages: Mapping[str, Message], what: str) -> Iterator[Reply]:
        """As :meth:`ask`, where every answer is needed; ``what`` the clients have to do, for the message.

        Raises:
            RunError: a reply has an error.
        """
        for reply in self.ask(messages):
            if reply.error is not None:
                raise RunError(f"{reply.client} could not {what}: {reply.error}")
            yield reply


def silent(line: str) -> None:
    """For all members but the first, whose notices would be repetitions."""
