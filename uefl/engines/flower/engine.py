"""The engine of a run with clients in other processes, over Flower.

It sends one message per client and round, with our own deadline. A roster knows which node stands for which
client: a node passes messages, and its reply to a greeting names its client.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping

from .. import bounds, faults
from ..base import Message, Reply
from ..codec import Header, Packet, packed_message, received
from . import GONE, LARGE, TORN
from .link import Link

_PAUSE = 0.5  # seconds between two looks at the roster
_EVERY = 1.0  # seconds between two requests for the list of nodes
_LIFE = 3600.0  # seconds after which a greeting is dropped
_REFUSAL_LIFE = 60.0  # seconds after which a message to a refused node expires
_RETURN = 60.0  # seconds for a client to return after Flower has noticed its loss
_MARGIN = 5.0  # seconds that Flower keeps a message beyond the deadline, so that uefl decides first


class Roster:
    """Which node stands for which client: here always the same nodes, which can each reply for any client.

    Args:
        nodes: the number of the node by name.
    """

    def __init__(self, nodes: dict[str, int]) -> None:
        self.nodes = nodes

    def refresh(self) -> list[str]:
        """Return the names that have moved to another node or activation since the last call."""
        return []


class ClientNodes(Roster):
    """The clients of a run by name, kept up to date.

    A client that starts again is a new node, or a new activation of its node: Flower gives each start of a
    node another activation. The server greets this node again, and the name of the client moves to it.

    Args:
        greeting: is sent to every node once; the reply has the ``client``'s name.
        admit: returns why a client that reports cannot take part, or None; a client with a reason is refused.
        bound: if nodes have keys, the hash of the key of each name. A name without an entry belongs to the
            first key that uses it. None: nodes have no keys, and a name moves to the last node that uses it.
    """

    def __init__(
        self,
        link: Link,
        greeting: Header,
        admit: Callable[[Packet], str | None],
        *,
        bound: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({})
        self._link, self._greeting, self._admit = link, greeting, admit
        self.keys: dict[str, str] | None = None if bound is None else dict(bound)
        """by name, the hash of its key"""
        self._greeted: dict[str, tuple[int, str]] = {}
        """by the number of the greeting, the node and the hash of its key"""
        self._known: dict[int, str] = {}
        """the last activation of each node that was greeted"""
        self._looked = 0.0
        self.refused: dict[int, str] = {}
        """by node, why it was refused"""

    def refresh(self) -> list[str]:
        """Greet new nodes and read their replies, and return the names that have moved."""
        if time.monotonic() - self._looked < _EVERY:
            return []
        self._looked = time.monotonic()
        for node, activation, key in self._link.nodes():
            if self._known.get(node) != activation:
                self._known[node] = activation
                number = self._send(node, self._greeting, _LIFE)
                if number is not None:
                    self._greeted[number] = node, hashlib.sha256(bytes.fromhex(key)).hexdigest()
        heard = self._link.arrived(self._greeted, 0)
        names = [self._accept_report(number, found) for number, found in heard.items()]
        return [name for name in names if name is not None]

    def _send(self, node: int, header: Header, life: float) -> str | None:
        return self._link.push(node, Packet(header, {}), life, bounds.REPORT)

    def _accept_report(self, number: str, report: Packet | str) -> str | None:
        node, key = self._greeted.pop(number)
        if report == GONE:  # a new process of this node has another activation, and is greeted again
            return None
        if isinstance(report, str):
            self.refused[node] = "it does not reply as a silo of uefl does"
            return None
        name = report.header.get("client")
        if not isinstance(name, str):
            self._refuse(node, "its report cannot be read")
            return None
        why = self._key_conflict(name, key) or self._admit(report)
        if why is not None:
            self._refuse(node, why)
            return None
        if self.keys is not None:
            self.keys[name] = key
        self.refused.pop(node, None)
        moved = name in self.nodes
        self.nodes[name] = node
        return name if moved else None

    def _key_conflict(self, name: str, key: str) -> str | None:
        """Return why a key may not belong to a name, or None: a name has one key, and a key one name."""
        if self.keys is None:
            return None
        if self.keys.get(name, key) != key:
            return (
                f"the name {name[:64]!r} belongs to another key; give another --name, or for a new key"
                " remove the name from the server's silos.json"
            )
        other = next((other for other, known in self.keys.items() if known == key and other != name), None)
        return None if other is None else f"the name {name[:64]!r} comes with the key of {other!r}"

    def refuse(self, name: str, why: str) -> None:
        """Refuse a client that was admitted."""
        self._refuse(self.nodes.pop(name), why)

    def _refuse(self, node: int, why: str) -> None:
        """Refuse a node and send it the reason, without waiting for its reply."""
        self.refused[node] = why
        number = self._send(node, self._greeting | {"ask": "refused", "why": why}, _REFUSAL_LIFE)
        self._link.forget([number] if number else [])


class FlowerEngine:
    """Clients behind a SuperLink.

    If a client is started again before it has replied, it gets the same message again. The repeated work has
    the same bits, so the results of the run do not change.

    Args:
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
        """Send all messages, and yield the replies by name, or errors for those that miss the deadline."""
        end = math.inf if deadline is None else time.monotonic() + deadline
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
                left = min(max(end - time.monotonic(), 0), _PAUSE)
                for number, found in self._link.arrived(awaited, left).items():
                    client = awaited.pop(number)
                    lost = found in (TORN, LARGE, faults.NOT_READ) and time.monotonic() <= end
                    if lost and client not in torn:
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
                if now > end:
                    arrived |= {late: Reply(late, error="deadline passed") for late in awaited.values()}
                gone = (one for one, until in missed.items() if now > min(until, end))
                arrived |= {one: Reply(one, error=GONE) for one in gone}
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

    def _send(self, name: str, message: Message, end: float) -> str | None:
        packet = packed_message(message, self._header | {"client": name})
        life = None if end == math.inf else max(end - time.monotonic(), 0) + _MARGIN
        return self._link.push(self._roster.nodes[name], packet, life, bounds.largest_reply(message))
