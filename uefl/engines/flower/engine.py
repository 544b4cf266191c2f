"""One message per client and round over Flower's Grid, with our own deadline: the engine of a run with
clients in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from flwr.app import Message as Sent
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from .. import bounds, faults
from ..base import Message, Reply
from ..codec import Header, Unreadable
from .codec import pack_message, unpack_reply
from .grid import UNREADABLE
from .limits import LARGE, at_most
from .members import Roster, push

# seconds between two questions for replies: at first, and after a long time without replies
_PAUSES = (0.02, 0.5)
_RETURN = 30.0  # seconds for a client to return after Flower has noticed that it is gone
_MARGIN = 5.0  # seconds that Flower keeps a message beyond the deadline, so that it is we who give it up


class FlowerEngine:
    """Clients behind a Grid.

    A client that is started again while its reply is awaited gets the same message again: its work is the
    same, bit for bit, so a run does not see the difference.

    Args:
        grid: of the run.
        members: who is there; all of them have been heard once.
        header: the facts that a client needs for its work, sent with every message.
        started: called with the client's name as its message is sent.
    """

    def __init__(
        self, grid: Grid, members: Roster, header: Header, started: Callable[[str], None] = lambda name: None
    ) -> None:
        self._grid, self._members, self._header, self._started = grid, members, header, started
        self._gone: set[str] = set()
        """clients with no node at their last request"""
        self._most = 0
        """bytes that the largest reply of this round may have"""

    def clients(self) -> list[str]:
        """Return the names of the clients that have answered, sorted, including clients that have left."""
        return sorted(self._members.nodes)

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Send all messages, then yield the replies by name; past the deadline, an error for each that is
        missing."""
        end = None if deadline is None else time.monotonic() + deadline
        self._most = 0
        awaited: dict[str, str] = {}
        missed: dict[str, float] = {}
        """clients that have just gone, and until when they may come again"""

        def ask(client: str) -> None:
            number = self._send(client, messages[client], end)
            if number is not None:
                awaited[number] = client
            else:
                miss(client)

        def miss(client: str) -> None:  # one that was gone before is not waited for again
            missed[client] = time.monotonic() + (0 if client in self._gone else _RETURN)
            self._gone.add(client)

        for name in sorted(messages):
            self._started(name)
            ask(name)
        arrived: dict[str, Reply] = {}
        torn: set[str] = set()
        """clients with an incomplete reply, which were asked once more"""
        for name in sorted(messages):
            pause = _PAUSES[0]
            while name not in arrived:
                for sent in self._pull(awaited):
                    client, pause = awaited.pop(sent.metadata.reply_to_message_id, None), _PAUSES[0]
                    if client is None:
                        continue
                    if _is_torn(sent) and client not in torn and (end is None or time.monotonic() < end):
                        torn.add(client)
                        ask(client)
                    elif not _failed(sent, ErrorCode.NODE_UNAVAILABLE):
                        self._gone.discard(client)
                        arrived[client] = self._reply(sent, client)
                    else:
                        miss(client)
                now = time.monotonic()
                if end is not None and now > end:
                    arrived |= {late: Reply(late, error="deadline passed") for late in awaited.values()}
                arrived |= {
                    one: Reply(one, error="it is gone")
                    for one, until in missed.items()
                    if now > until or (end or now) < now
                }
                if name in arrived:
                    break
                for moved in self._members.look():
                    if (moved in awaited.values() or moved in missed) and moved not in arrived:
                        missed.pop(moved, None)
                        for number in [number for number, other in awaited.items() if other == moved]:
                            del awaited[number]
                        ask(moved)
                time.sleep(pause)
                pause = min(1.5 * pause, _PAUSES[1])
            missed.pop(name, None)
            yield arrived.pop(name)

    def _pull(self, awaited: Mapping[str, str]) -> list[Sent]:
        with at_most(self._most):
            return list(self._grid.pull_messages(list(awaited)))

    def _send(self, name: str, message: Message, end: float | None) -> str | None:
        self._most = max(self._most, bounds.largest_reply(message))
        content = pack_message(message, self._header | {"client": name})
        life = None if end is None else max(end - time.monotonic(), 0) + _MARGIN
        node, _ = self._members.nodes[name]
        return push(self._grid, node, content, life)

    def _reply(self, sent: Sent, name: str) -> Reply:
        if _is_torn(sent):
            return Reply(name, error="its reply did not come whole")
        if _says(sent, LARGE):
            return Reply(name, error=f"its reply has more than the {self._most} bytes that a reply may have")
        if _says(sent, UNREADABLE):
            return Reply(name, error="its reply cannot be read")
        if sent.has_error():
            return Reply(name, error=f"no reply (Flower's error {sent.error.code})")
        try:
            reply = unpack_reply(sent.content)
        except Unreadable:
            return Reply(name, error="its reply cannot be read")
        if reply.client != name:
            return Reply(name, error="the reply is of another client")
        return reply if reply.error is None else Reply(name, error=faults.words(reply.error))


def _is_torn(sent: Sent) -> bool:
    """Return True if another request may bring the missing part."""
    return (
        _failed(sent, ErrorCode.MESSAGE_UNAVAILABLE)
        and not _says(sent, LARGE)
        and not _says(sent, UNREADABLE)
    )


def _says(sent: Sent, why: str) -> bool:
    return bool(sent.has_error() and why in (sent.error.reason or ""))


def _failed(sent: Sent, code: int) -> bool:
    return bool(sent.has_error() and sent.error.code == code)
