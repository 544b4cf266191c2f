"""The Grid of a run at a SuperLink: malformed replies of a silo, and the count of their bytes."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Error, RecordDict
from flwr.app import Message as Sent
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_head_values_from_object_content,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.task_identity import TaskIdentity

from uefl.engines import bounds
from uefl.engines.base import Message, Reply
from uefl.engines.codec import Unreadable
from uefl.engines.flower.codec import pack, pack_reply, unpack
from uefl.engines.flower.engine import FlowerEngine
from uefl.engines.flower.grid import CheckedGrid
from uefl.engines.flower.limits import TooLarge, brought
from uefl.engines.flower.members import Members


class SuperLink:
    """One that has two nodes, 7 and 8. Node 7 answers what ``reply`` makes of a message: head, tree and
    parts; node 8 is honest."""

    def __init__(self, reply, content):
        self._replies = {7: reply, 8: honest}
        self._content, self._sent, self._parts = content, {}, {}

    def GetNodes(self, request):  # these are Flower's names
        return SimpleNamespace(
            nodes=[
                SimpleNamespace(node_id=node, last_activated_at="1", public_key=b"%d" % node)
                for node in self._replies
            ]
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
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=self._parts[request.object_id]
        )

    def PushObject(self, request): ...

    ConfirmMessageReceived = PushObject


def honest(asked, content, instead=None):
    reply = Sent(content, reply_to=message_from_proto(asked))
    if instead is not None:
        reply.metadata.__dict__["_reply_to_message_id"] = instead
    parts, tree = (
        {name: one.deflate() for name, one in get_all_nested_objects(reply).items()},
        get_object_tree(reply),
    )
    reply.metadata.__dict__["_message_id"] = reply.object_id
    head = message_to_proto(remove_content_from_message(reply))
    # without which the SuperLink does not take it
    head.metadata.reply_to_message_id = asked.metadata.message_id
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
def test_a_malformed_reply_is_rejected_and_the_others_go_on(reply):
    assert round_of(reply) == ["its reply cannot be read", None]


def test_an_error_without_a_reason_is_rejected_too():
    assert round_of(lambda asked, content: honest(asked, Error(ErrorCode.MESSAGE_UNAVAILABLE))) == [
        "its reply did not come whole",
        None,
    ]


@malformed
def test_a_malformed_reply_to_a_greeting_is_a_stranger(reply):
    one = grid(reply, lambda node: pack({"client": f"silo-{node - 7}"}))
    members = Members(one, {"ask": "report"}, lambda report: None)
    members.look()
    assert members.nodes == {"silo-1": (8, "1")}
    assert members.refused == {7: "it does not answer as a silo of uefl does"}


def swollen(array):
    """A reply in which one array of a megabyte is ``array`` of it: parts that are few on the wire and many in
    memory."""

    def reply(asked, content):
        content["update"] = ArrayRecord({"values": Array("uint8", (2**20,), "uefl.raw", bytes(2**20))})
        head, tree, parts = honest(asked, content)
        return head, *array(head.metadata.message_id, tree, parts)

    return reply


def repeated(kind, change):
    """Return the parts with one kind changed, and all dependent names."""

    def made(root, tree, parts):
        names, new = {}, {}

        def again(node):
            children = [again(child) for child in node.children]
            part = parts[node.object_id]
            of, old, _ = get_object_head_values_from_object_content(part)
            body = part[part.index(b"\0") + 1 :]
            if of == kind:
                body = change(body)
            for before, after in names.items():
                body = body.replace(before.encode(), after.encode())
            head = f"{of} {','.join(names[name] for name in old)} {len(body)}"
            whole = head.encode() + b"\0" + body
            names[node.object_id] = get_object_id(whole)
            new[names[node.object_id]] = whole
            return ObjectTree(object_id=names[node.object_id], children=children)

        return again(tree), new

    return made


def many_chunks(body):
    about = json.loads(body)
    return json.dumps(about | {"arraychunk_ids": about["arraychunk_ids"] * 300}).encode()


def many_names(body):
    (name,) = json.loads(body).values()
    return json.dumps({f"{i}": name for i in range(300)}).encode()


BOMBS = {
    "one part named many times": repeated("Array", many_chunks),
    "one array under many names": repeated("ArrayRecord", many_names),
}
bombs = pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)


@bombs
def test_a_reply_that_swells_in_memory_is_not_made(bomb, monkeypatch):
    """The attack on the bound of a reply: a megabyte on the wire, 300 in memory."""
    made, original = [], Array.inflate.__func__
    monkeypatch.setattr(
        Array, "inflate", classmethod(lambda cls, *rest: made.append(original(cls, *rest)) or made[-1])
    )
    first, second = round_of(swollen(bomb))
    assert "bytes that a reply may have" in first
    assert second is None
    assert sum(len(array.data) for array in made) < 2**21


@bombs
def test_so_is_a_report(bomb):
    one = grid(swollen(bomb), lambda node: pack({"client": f"silo-{node - 7}"}))
    members = Members(one, {"ask": "report"}, lambda report: None)
    members.look()
    assert members.nodes == {"silo-1": (8, "1")}
    assert set(members.refused) == {7}


@bombs
def test_so_is_a_message_to_a_silo(bomb, monkeypatch):
    monkeypatch.setattr(bounds, "MESSAGE", 2**25)
    message = Sent(
        RecordDict({"a": ArrayRecord({"values": Array("uint8", (2**20,), "uefl.raw", bytes(2**20))})}),
        7,
        "train",
    )
    parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    tree, parts = bomb(None, get_object_tree(message), parts)
    with pytest.raises(TooLarge):
        brought(tree, parts.__getitem__, lambda name: None, bounds.MESSAGE)


def test_a_name_that_is_repeated_copies_nothing():
    content = pack({}, update={"a": torch.zeros(3)})
    header = json.loads(content.config_records["header"]["json"])
    content.config_records["header"]["json"] = json.dumps(header | {"tensors": {"update": ["a", "a"]}})
    with pytest.raises(Unreadable):
        unpack(content)


def test_the_bytes_of_a_reply_are_counted(monkeypatch):
    monkeypatch.setattr(bounds, "HEADER", 2000)
    assert round_of(honest) == [None, None]
    first, second = round_of(honest, mine=torch.zeros(bounds.largest_reply(Message())))
    assert first == second
    assert "bytes that a reply may have" in first
