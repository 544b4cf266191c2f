"""A link to a run without Flower: nodes are programs, and contents go through the bytes of a packet."""

from __future__ import annotations

from collections import deque

from uefl.engines.codec import decode, encode
from uefl.engines.flower import GONE, LARGE, TORN
from uefl.engines.flower.link import Node


class MemoryLink:
    """Nodes by number.

    A node without a key in ``keys`` has its own key. A node that returns None does not reply. ``log`` has
    the node of each message.

    A message to a node in ``unregistered`` gets no number. ``torn`` counts, by node, the replies that are
    lost for the reason ``why``.
    """

    def __init__(self, nodes):
        self.nodes_there, self.activated = dict(nodes), dict.fromkeys(nodes, "1")
        self.keys = {}
        self.torn, self.why = {}, TORN
        self.unregistered = set()
        self.log = deque()
        self._replies, self._number = {}, 0

    def nodes(self):
        return [
            Node(node, at, self.keys.get(node, b"%d" % node).hex()) for node, at in self.activated.items()
        ]

    def push(self, node, packet, life, most):
        if node in self.unregistered:
            return None
        self._number += 1
        self.log.append(node)
        if node not in self.nodes_there:
            reply = GONE
        else:
            reply = self.nodes_there[node](decode(encode(packet)))
            if self.torn.get(node):
                self.torn[node] -= 1
                reply = self.why
        if reply is not None:
            self._replies[str(self._number)] = reply if isinstance(reply, str) else _sent(reply, most)
        return str(self._number)

    def arrived(self, numbers, seconds):
        return {number: self._replies.pop(number) for number in list(numbers) if number in self._replies}

    def forget(self, numbers):
        for number in numbers:
            self._replies.pop(number, None)


def _sent(reply, most):
    frame = encode(reply)
    return LARGE if len(frame) > most else decode(frame)
