"""The engine of a run with clients in other processes, over Flower.

It sends one message per client and round, with our own deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from .. import bounds, faults
from ..base import Message, Reply
from ..codec import Header, packed_message, received
from . import GONE, LARGE, TORN
from .link import Link
from .roster import Roster

_PAUSE = 0.5  # seconds between two requests for the list of nodes
_RETURN = 60.0  # seconds for a client to return after Flower has noticed its loss
_MARGIN = 5.0  # seconds that Flower keeps a message beyond the deadline, so that uefl decides first


class FlowerEngine:
    """Clients behind a SuperLink.

    If a client is started again before it has replied, it gets the same message again. The repeated work has
    the same bits, so the results of the run do not change.

    Args:
        link: connection of the run.
        roster: the node of each client; every client has replied at least once.
        header: the facts that a client needs for its work, sent with every message.
        started: called with the client's name as its message is sent.
    """

    def __init__(
        self, link: Link, roster: Roster, header: Header, started: Callable[[str], None] = lambda name: None
    ) -> None:
        self._link, self._roster, self._header, self._started = link, roster, header, started
        self._gone: set[str] = set()
        """clients with no node at their last request"""

    def clients(self) -> list[str]:
        """Return the names of the clients that have replied, sorted, including clients that have left."""
        return sorted(self._roster.nodes)

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Send all messages, then yield the replies by name.

        After the deadline, yield an error for each missing reply.
        """
        end = None if deadline is None else time.monotonic() + deadline
        awaited: dict[str, str] = {}
        missed: dict[str, float] = {}
        """for each client that has just gone, the time until which the run waits for its return"""

        def ask(client: str) -> None:
            number = self._send(client, messages[client], end)
            if number is not None:
                awaited[number] = client
            else:
                miss(client)

        def miss(client: str) -> None:  # the run does not wait again for a client that was gone before
            missed[client] = time.monotonic() + (0 if client in self._gone else _RETURN)
            self._gone.add(client)

        for name in sorted(messages):
            self._started(name)
            ask(name)
        arrived: dict[str, Reply] = {}
        torn: set[str] = set()
        """clients that were asked once more, because their reply was lost or could not be read"""
        for name in sorted(messages):
            while name not in arrived:
                left = _PAUSE if end is None else end - time.monotonic()
                for number, found in self._link.arrived(awaited, min(max(left, 0), _PAUSE)).items():
                    client = awaited.pop(number)
                    if found in (TORN, LARGE, faults.NOT_READ) and client not in torn and not _is_over(end):
                        torn.add(client)
                        ask(client)
                    elif found != GONE:
                        self._gone.discard(client)
                        arrived[client] = (
                            Reply(client, error=found) if isinstance(found, str) else received(found, client)
                        )
                    else:
                        miss(client)
                now = time.monotonic()
                if _is_over(end):
                    arrived |= {late: Reply(late, error="deadline passed") for late in awaited.values()}
                arrived |= {
                    one: Reply(one, error=GONE)
                    for one, until in missed.items()
                    if now > until or (end or now) < now
                }
                if name in arrived:
                    break
                for moved in self._roster.refresh():
                    if (moved in awaited.values() or moved in missed) and moved not in arrived:
                        missed.pop(moved, None)
                        old = [number for number, other in awaited.items() if other == moved]
                        self._link.forget(old)
                        for number in old:
                            del awaited[number]
                        ask(moved)
            missed.pop(name, None)
            yield arrived.pop(name)
        self._link.forget(awaited)

    def _send(self, name: str, message: Message, end: float | None) -> str | None:
        packet = packed_message(message, self._header | {"client": name})
        life = None if end is None else max(end - time.monotonic(), 0) + _MARGIN
        node, _ = self._roster.nodes[name]
        return self._link.push(node, packet, life, bounds.largest_reply(message))


def _is_over(end: float | None) -> bool:
    return end is not None and time.monotonic() > end
