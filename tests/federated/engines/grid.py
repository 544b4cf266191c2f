"""A Grid without a network: nodes are functions, and contents go through Flower's own bytes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.task_identity import TaskIdentity

from uefl.engines.flower.limits import TRIES, _allowed, bounded, check_size


def sent(content: RecordDict) -> RecordDict:
    """Return the message at the other end, part by part as over Flower's Grid."""
    parts = {name: one.deflate() for name, one in get_all_nested_objects(content).items()}
    pulled = pull_objects(list(parts), bounded(parts.__getitem__, _allowed.get()), max_tries_per_object=TRIES)
    check_size(content.object_id, pulled, _allowed.get())
    return inflate_object_from_contents(content.object_id, pulled)


class MemoryGrid(Grid):
    """Nodes by number, each with a key of its own where ``keys`` has none. A node that returns None does not
    answer; ``log`` has the node of each message.

    A message to a node in ``unregistered`` gets no number. Of so many answers of a node as ``torn`` says, a
    part does not come.
    """

    def __init__(self, nodes):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.nodes, self.activated = dict(nodes), dict.fromkeys(nodes, "1")
        self.keys = {}
        self.replies = {}
        self.torn = {}
        self.unregistered = set()
        self.number = 0
        self.log = deque()

    def set_run(self, run): ...

    @property
    def run(self):
        return None

    def create_message(self, *arguments, **keys):
        raise NotImplementedError

    def send_and_receive(self, *arguments, **keys):
        raise NotImplementedError

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=node, last_activated_at=at, public_key=self.keys.get(node, b"%d" % node))
            for node, at in self.activated.items()
        ]

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            if message.metadata.dst_node_id in self.unregistered:
                numbers.append("")
                continue
            self.number += 1
            numbers.append(str(self.number))
            message.metadata.__dict__["_message_id"] = numbers[-1]
            node = message.metadata.dst_node_id
            self.log.append(node)
            if node not in self.nodes:
                self.replies[numbers[-1]] = Error(ErrorCode.NODE_UNAVAILABLE, "gone"), message
                continue
            answer = self.nodes[node](sent(message.content))
            if self.torn.get(node):
                self.torn[node] -= 1
                self.replies[numbers[-1]] = Error(ErrorCode.MESSAGE_UNAVAILABLE, "torn"), message
                continue
            if answer is not None:
                self.replies[numbers[-1]] = answer, message
        return numbers

    def pull_messages(self, message_ids):
        return [self._brought(*self.replies.pop(number)) for number in message_ids if number in self.replies]

    def _brought(self, answer, message):
        try:
            return Message(answer if isinstance(answer, Error) else sent(answer), reply_to=message)
        except ObjectPullError as error:
            return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, f"unavailable. {error}"), reply_to=message)
