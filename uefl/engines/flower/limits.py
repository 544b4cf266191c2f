"""How long Flower's requests are tried, and how much they may bring: what it would end this process for, wait hours for, or fill the
memory with, is an exception here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import httpx
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.retry import RetryInvoker

from .. import bounds

TRIES = 7
"""questions for a part of a message that its sender has not sent yet: 35 s in all, with pauses of 1, 2, 4, 8, 10 and 10 s"""


def stop_at_refusal(invoker: RetryInvoker) -> None:
    """Give up where the SuperLink does not take a signature (401) or a run has ended (403).

    Flower would send this process Ctrl-C, or raise what no ``except Exception`` catches.
    """
    flowers = invoker.should_giveup

    def gives_up(error: Exception) -> bool:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403)
        return refused or (flowers is not None and flowers(error))

    invoker.should_giveup = gives_up


LARGE = "it has more bytes than it may have"
"""stands in the reason of Flower's error"""
_PART = 1000  # bytes that a part counts for beside its content, so that many small ones are bounded too
_allowed: ContextVar[int] = ContextVar("allowed", default=bounds.MESSAGE)


class TooLarge(ObjectPullError):  # type: ignore[misc]
    """A message that is given up in the middle."""


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No message that the Grid brings in this context has more bytes; one that has is an error, with :data:`LARGE` in its reason."""
    token = _allowed.set(size)
    try:
        yield
    finally:
        _allowed.reset(token)


def limited(pull: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """:func:`bounded` to as many bytes as :func:`at_most` says."""
    return bounded(pull, _allowed.get())


def bounded(pull: Callable[[str], bytes], most: int) -> Callable[[str], bytes]:
    """A function that brings the parts of one message, in several threads, until they have more than so many bytes together.

    Raises:
        TooLarge: they have.
    """
    lock, total = threading.Lock(), 0

    def limited(name: str) -> bytes:
        nonlocal total
        if total > most:
            raise TooLarge(name, LARGE)
        content = pull(name)
        with lock:
            total += len(content) + _PART
        if total > most:
            raise TooLarge(name, LARGE)
        return content

    return limited
