"""How long Flower's requests are tried: what it would end this process for, or wait hours for, is an exception here."""

from __future__ import annotations

import httpx
from flwr.supercore.retry import RetryInvoker

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
