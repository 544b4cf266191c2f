"""The connected clients: which node stands for which client. A node is transport; it says its client's name
when it is greeted."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from .. import bounds
from ..codec import Header, Tensors, Unreadable
from .codec import pack, unpack
from .limits import at_most

_EVERY = 1.0  # seconds between two looks at the nodes
_LIFE = 3600.0  # seconds after which a greeting is dropped
_WORD = 60.0  # seconds after which a word to a refused node expires

Report = tuple[Header, dict[str, Tensors]]
"""the report of a client when it is greeted"""


class Roster(Protocol):
    """Which node stands for which client."""

    nodes: dict[str, tuple[int, str]]
    """by name, the node and its activation"""

    def look(self) -> list[str]:
        """Return the names that have moved to another node or activation since the last call."""
        ...


class Members:
    """The clients of a run by name, kept up to date.

    A client that starts again is a new activation of its node, or a new node; it is greeted again, and its
    name moves there.

    Args:
        grid: of the run.
        greeting: is sent to every node once; the reply has the ``client``'s name.
        admit: says why a client that reports cannot take part, or None; such a client is refused.
        bound: for nodes with keys: by name, the hash of the key that it belongs to. A name that is not there
            belongs to the key that brings
            it first. None: a name moves to whoever brings it last.
    """

    def __init__(
        self,
        grid: Grid,
        greeting: Header,
        admit: Callable[[Report], str | None],
        *,
        bound: Mapping[str, str] | None = None,
    ) -> None:
        self._grid, self._greeting, self._admit = grid, greeting, admit
        self.keys: dict[str, str] | None = None if bound is None else dict(bound)
        """by name, the hash of the key that it belongs to"""
        self._key_of: dict[int, str] = {}
        """by node, the hash of its key"""
        self._greeted: dict[str, tuple[int, str]] = {}
        """by the number of the greeting, the node and its activation"""
        self._known: dict[int, str] = {}
        """the last activation of each node that was greeted"""
        self._looked = 0.0
        self.nodes: dict[str, tuple[int, str]] = {}
        """by name, the node and its activation"""
        self.refused: dict[int, str] = {}
        """by node, why it was refused"""

    def look(self) -> list[str]:
        """Greet new nodes and read their replies; names that have moved to another node or
        activation."""
        if time.monotonic() - self._looked < _EVERY:
            return []
        self._looked = time.monotonic()
        for info in self._grid.get_nodes():
            if self._known.get(info.node_id) != info.last_activated_at:
                self._known[info.node_id] = info.last_activated_at
                self._key_of[info.node_id] = hashlib.sha256(info.public_key).hexdigest()
                number = push(self._grid, info.node_id, pack(self._greeting), _LIFE)
                if number is not None:
                    self._greeted[number] = (info.node_id, info.last_activated_at)
        return [name for message in self._replies() if (name := self._hear(message)) is not None]

    def _replies(self) -> list[Message]:
        with at_most(bounds.REPORT):
            return list(self._grid.pull_messages(list(self._greeted))) if self._greeted else []

    def _hear(self, message: Message) -> str | None:
        node = self._greeted.pop(message.metadata.reply_to_message_id, None)
        if node is None:
            return None
        if message.has_error():
            # it has ended; one that takes its place is another activation
            if message.error.code == ErrorCode.NODE_UNAVAILABLE:
                return None
            self.refused[node[0]] = "it does not answer as a silo of uefl does"
            return None
        try:
            report = unpack(message.content)
            name = str(report[0]["client"])
        except (Unreadable, KeyError):
            self._refuse(node[0], "its report cannot be read")
            return None
        key = self._key_of[node[0]]
        why = self._stranger(name, key) or self._admit(report)
        if why is not None:
            self._refuse(node[0], why)
            return None
        if self.keys is not None:
            self.keys[name] = key
        self.refused.pop(node[0], None)
        moved = name in self.nodes
        self.nodes[name] = node
        return name if moved else None

    def _stranger(self, name: str, key: str) -> str | None:
        """Return why a key may not belong to a name, or None: each name has one key, and each key one
        name."""
        if self.keys is None:
            return None
        if self.keys.get(name, key) != key:
            return (
                f"the name {name[:64]!r} is that of another key; give another --name, or for a new key see"
                " silos.json in docs/security.md"
            )
        other = next((other for other, known in self.keys.items() if known == key and other != name), None)
        return None if other is None else f"the name {name[:64]!r} comes with the key of {other!r}"

    def refuse(self, name: str, why: str) -> None:
        """Refuse a client that was admitted."""
        node, _ = self.nodes.pop(name)
        self._refuse(node, why)

    def _refuse(self, node: int, why: str) -> None:
        """Refuse a node, and tell it why; its reply is not awaited."""
        self.refused[node] = why
        push(self._grid, node, pack(self._greeting | {"ask": "refused", "why": why}), _WORD)


def push(grid: Grid, node: int, content: RecordDict, life: float | None) -> str | None:
    """Send a content to a node; the number under which the reply can be asked for, None where the SuperLink
    knows the node no more.

    Args:
        grid: of the run.
        node: to which.
        content: for it.
        life: seconds after which a message that was not fetched, or a reply to it, is dropped.
    """
    (number,) = grid.push_messages([Message(content, node, "train", ttl=life)])
    return str(number) if number else None
