"""A client's end of Flower: which failures of a SuperLink it outlives."""

import os
import signal
from contextlib import contextmanager
from datetime import timedelta

import pytest

pytest.importorskip("flwr")

import httpx
import torch
from flwr.app import Message
from flwr.app.message import message as flowers_message
from flwr.app.message import remove_content_from_message
from flwr.server.utils.validator import validate_message
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from uefl.engines.codec import Packet
from uefl.engines.flower import node
from uefl.engines.flower.address import Address, Unreachable
from uefl.engines.flower.records import pack, unpack

ADDRESS = Address("127.0.0.1:1", insecure=True)


class Enough(Exception):
    """Ends a loop that otherwise never ends."""


def status(code):
    return httpx.HTTPStatusError(
        "", request=httpx.Request("POST", "http://x"), response=httpx.Response(code, text="{}")
    )


@pytest.fixture
def superlink(monkeypatch):
    """Plays what connections do, one after the other: an exception before there is one, or an action."""
    acts = []

    @contextmanager
    def connection(*arguments, **keys):
        if not acts:
            raise Enough
        act = acts.pop(0)
        if isinstance(act, Exception):
            try:
                raise act
            except Exception:
                node.fleet.flwr_exit()
        heartbeat = node._Heartbeat(act[1])
        heartbeat.start()
        yield (None, act[0], *[None] * 6)

    monkeypatch.setattr(node.fleet, "http_request_response", connection)
    monkeypatch.setattr(node, "_AGAIN", 0.0)
    monkeypatch.setattr(Address, "wait", lambda self, seconds: None)
    return acts


def serve(patience=60.0):
    node.serve(ADDRESS, lambda records: records, patience=patience)


def healthy():
    return True


def gone():
    raise Enough


def failing(error):
    def beat():
        raise error

    return beat


@pytest.mark.parametrize("error", [status(500), status(503), httpx.ConnectError("away")])
def test_a_superlink_that_is_not_well_is_tried_again(superlink, error):
    superlink += [error, error, (gone, healthy)]
    with pytest.raises(Enough):
        serve()
    assert not superlink


def test_what_does_not_leave_the_machine_goes_to_no_proxy(superlink, monkeypatch):
    monkeypatch.setenv("no_proxy", "example.org")
    superlink += [(gone, healthy)]
    with pytest.raises(Enough):
        serve()
    assert os.environ["no_proxy"] == "example.org,127.0.0.1"


def test_but_not_for_ever(superlink):
    superlink += [status(500)] * 3
    with pytest.raises(Unreachable, match=r"SuperLink .*silo .*clock"):
        serve(patience=-1.0)
    assert len(superlink) == 2


def test_a_refusal_is_final_where_there_is_no_key_to_wait_for(superlink):
    superlink += [status(403), (gone, healthy)]
    with pytest.raises(Unreachable, match=r"SuperLink .*silo .*clock"):
        serve()


@pytest.mark.parametrize(
    "error", [status(500), RuntimeError("The SuperLink does not recognize this SuperNode.")]
)
def test_a_heartbeat_that_is_not_taken_connects_again(superlink, error):
    superlink += [(lambda: None, failing(error)), (gone, healthy)]
    with pytest.raises(Enough):
        serve()
    assert not superlink


def test_a_refused_heartbeat_sends_nobody_a_signal(superlink):
    superlink += [(lambda: None, lambda: node.fleet.os.kill(os.getpid(), signal.SIGINT)), (gone, healthy)]
    with pytest.raises(Enough):
        serve()
    assert not superlink


@pytest.mark.parametrize("code", [401, 403])
def test_a_run_that_has_ended_is_an_error_that_can_be_caught(code):
    invoker = node.fleet.make_simple_http_retry_invoker()
    with pytest.raises(httpx.HTTPStatusError):
        invoker.invoke(failing(status(code)))


def answered(answer, life=None, **parts):
    """Return the answer to a message with these parts and this lifetime in seconds."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(pack(Packet({"ask": "work"}, parts)), 7, "train", ttl=life)
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    head, tree, heard, pulled = remove_content_from_message(message), get_object_tree(message), [], []
    node._Heartbeat(healthy).start()
    turns = iter([(head, tree)])

    def receive():
        return next(turns, None) or gone()

    def pull(run, name):
        pulled.append(name)
        return parts[name]

    def send(reply, tree, seconds):
        heard.append(reply)
        return set(), ""

    with pytest.raises(Enough):
        node._answer_all((None, receive, send, None, None, pull, healthy, lambda run, name: None), answer)
    assert len(pulled) <= len(parts)
    (reply,) = heard
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    return reply


def test_an_oversized_message_is_answered_unread(monkeypatch, caplog):
    """The reply is an error, and the silo goes on."""
    monkeypatch.setattr(node.bounds, "MESSAGE", 20_000)
    given = []

    def answer(records):
        given.append(records)
        return pack(Packet({"error": "unreadable"}, {}))

    reply = answered(answer, broadcast={"values": torch.zeros(50_000)})
    assert [dict(records) for records in given] == [{}]
    assert unpack(reply.content).header == {"error": "unreadable"}
    assert "20000 bytes" in caplog.text


@pytest.mark.parametrize("ahead", [-240, 0, 240])
def test_reply_lifetime_follows_the_message_not_the_silos_clock(monkeypatch, ahead):
    def answer(records):
        monkeypatch.setattr(flowers_message, "now", lambda: now() + timedelta(seconds=ahead))
        return records

    reply = answered(answer, life=65.0)
    assert reply.metadata.ttl == 65.0
    assert abs(reply.metadata.created_at - now().timestamp()) < 30
    assert not [
        error
        for error in validate_message(reply, is_reply_message=True)
        if "metadata.src_node_id" not in error
    ]
