"""The Grid of a run at a SuperLink: what a silo may put into a reply, and that its bytes are counted."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Error
from flwr.app import Message as Sent
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.task_identity import TaskIdentity

from uefl.engines import bounds
from uefl.engines.base import Message, Reply
from uefl.engines.flower.codec import pack, pack_reply
from uefl.engines.flower.engine import FlowerEngine
from uefl.engines.flower.grid import CheckedGrid
from uefl.engines.flower.members import Members


class SuperLink:
    """One that has two nodes, 7 and 8. Node 7 answers what ``reply`` makes of a message: head, tree and parts; node 8 is honest."""

    def __init__(self, reply, content):
        self._replies = {7: reply, 8: honest}
        self._content, self._sent, self._parts = content, {}, {}

    def GetNodes(self, request):  # these are Flower's names
        return SimpleNamespace(
            nodes=[SimpleNamespace(node_id=node, last_activated_at="1", public_key=b"%d" % node) for node in self._replies]
        )

    def PushMessages(self, request):
        (head,) = request.messages_list
        self._sent[head.metadata.message_id] = head
        return SimpleNamespace(session_id="s", objects_to_push=[], message_ids=[head.metadata.message_id])

    def PullMessages(self, request):
        heads, trees = [], []
        for number in request.message_ids:
            if (asked := self._sent.pop(number, None)) is not None:
                node = asked.metadata.dst_node_id
                head, tree, parts = self._replies[node](asked, self._content(node))
                for part in parts.values():
                    validate_object_content(part)  # as the SuperLink does
                self._parts |= parts
                heads.append(head)
                trees.append(tree)
        return SimpleNamespace(messages_list=heads, message_object_trees=trees)

    def PullObject(self, request):
        return PullObjectResponse(object_found=True, object_available=True, object_content=self._parts[request.object_id])

    def PushObject(self, request): ...

    ConfirmMessageReceived = PushObject


def honest(asked, content, instead=None):
    reply = Sent(content, reply_to=message_from_proto(asked))
    if instead is not None:
        reply.metadata.__dict__["_reply_to_message_id"] = instead
    parts, tree = {name: one.deflate() for name, one in get_all_nested_objects(reply).items()}, get_object_tree(reply)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    head = message_to_proto(remove_content_from_message(reply))
    head.metadata.reply_to_message_id = asked.metadata.message_id  # without which the SuperLink does not take it
    return head, tree, parts


def answers_another(asked, content):
    return honest(asked, content, instead=64 * "f")


def with_root(kind, body):
    def reply(asked, content):
        head, _, _ = honest(asked, content)
        part = f"{kind}  {len(body)}".encode() + b"\0" + body
        head.metadata.message_id = get_object_id(part)
        return head, ObjectTree(object_id=head.metadata.message_id), {head.metadata.message_id: part}

    return reply


MALFORMED = {
    "answers another message": answers_another,
    "no message": with_root("ConfigRecord", b""),
    "garbage": with_root("Message", b"\xff\xff\xff"),
    "no content": with_root("Message", b""),
}
malformed = pytest.mark.parametrize("reply", MALFORMED.values(), ids=MALFORMED)


def grid(reply, content):
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    one = CheckedGrid("127.0.0.1:1", True, None, token="x")
    one._client, one._run = SuperLink(reply, content), SimpleNamespace(run_id=1)
    return one


def round_of(reply, **private):
    nodes = {"silo-0": (7, "1"), "silo-1": (8, "1")}
    one = grid(reply, lambda node: pack_reply(Reply(f"silo-{node - 7}", 1, private=private)))
    engine = FlowerEngine(one, SimpleNamespace(nodes=nodes, look=list), {"h": 1})
    return [found.error for found in engine.round({name: Message() for name in nodes}, 10.0)]


@malformed
def test_a_malformed_reply_is_left_out_and_the_others_go_on(reply):
    assert round_of(reply) == ["its reply cannot be read", None]


def test_an_error_without_a_reason_is_left_out_too():
    assert round_of(lambda asked, content: honest(asked, Error(ErrorCode.MESSAGE_UNAVAILABLE))) == ["its reply did not come whole", None]


@malformed
def test_a_malformed_answer_to_a_greeting_is_a_stranger(reply):
    one = grid(reply, lambda node: pack({"client": f"silo-{node - 7}"}))
    members = Members(one, {"ask": "report"}, lambda report: None)
    members.look()
    assert members.nodes == {"silo-1": (8, "1")}
    assert members.refused == {7: "it does not answer as a silo of uefl does"}


def test_the_bytes_of_a_reply_are_counted(monkeypatch):
    monkeypatch.setattr(bounds, "HEADER", 2000)
    assert round_of(honest) == [None, None]
    first, second = round_of(honest, mine=torch.zeros(bounds.largest_reply(Message())))
    assert first == second
    assert "bytes that a reply may have" in first
