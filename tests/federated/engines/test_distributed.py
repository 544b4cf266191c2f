"""Real workers: the numbers of the local engine, and failures of clients and workers."""

import os
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from tests.federated import tiny
from tests.federated.deploy.runs import children, gone
from tests.federated.engines.conformance import (
    DIES,
    LATE,
    check_raises,
    check_same,
    every_case,
    federation,
    messages,
    settings,
)
from uefl.deploy import sources
from uefl.deploy import workers as deploy
from uefl.engines import frames
from uefl.engines.base import Message, Reply
from uefl.engines.codec import encode, packed_reply
from uefl.engines.distributed import DistributedEngine, Worker
from uefl.errors import RunError
from uefl.lazy import Lazy


@contextmanager
def two_workers(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deploy, "mkdtemp", lambda prefix: str(folder))
        with deploy.on_workers(
            2, "cpu", lambda line: None, "this", "tests.federated.engines.tiny_worker"
        ) as started:
            yield started


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    with two_workers(tmp_path_factory.mktemp("workers")) as started:
        yield started


def engine(workers, cfg, started=lambda name: None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "build", lambda *_, **__: federation(cfg))
        workers.federation(cfg, None, {})
    return workers.engine("arm", started)


@pytest.mark.slow
@every_case
def test_every_algorithm_is_the_same_bit_for_bit(workers, case):
    cfg = settings(case)
    check_same(cfg, engine(workers, cfg))


def test_replies_are_named_and_a_worker_gets_the_model_once(workers, monkeypatch):
    cfg, started, sent = tiny.settings("fedavg"), [], {}
    one, ask = engine(workers, cfg, started.append), Worker.ask

    def asked(worker, packet):
        sent.setdefault(worker, []).append(list(packet.groups["broadcast"]))
        return ask(worker, packet)

    monkeypatch.setattr(Worker, "ask", asked)
    assert one.clients() == ["silo-0", "silo-1", "silo-2"]
    replies = [(reply.error, reply.client) for reply in one.round(messages(cfg))]
    assert replies == [(None, "silo-0"), (None, "silo-1"), (None, "silo-2")]
    assert started == one.clients()
    assert list(sent.values()) == [[["values", "buffers"], []], [["values", "buffers"]]]


def test_a_tensor_that_was_changed_in_place_is_sent_again(workers):
    cfg = tiny.settings("fedavg")
    one, asked = engine(workers, cfg), messages(cfg)
    values = asked["silo-0"].tensors["values"]
    ways = [[], []]
    for changed, found in enumerate(ways):
        message = {"silo-0": asked["silo-0"], "silo-2": asked["silo-2"]}  # both clients belong to one worker
        broken = Lazy(
            message,
            lambda name, changed=changed, message=message: _halved(
                message[name], changed and name == "silo-2"
            ),
        )
        found += [reply.training["train_loss"] for reply in one.round(broken)]
    assert values is asked["silo-2"].tensors["values"]
    assert ways[0][0] == ways[1][0]
    assert ways[0][1] != ways[1][1]


def _halved(message, really):
    if really:
        message.tensors["values"].mul_(0.5)
    return message


class Replying:
    """A worker without a process, which replies at once."""

    def __init__(self, asked):
        self._asked = asked

    def ask(self, packet):
        self._asked.append(packet.header["client"])
        reply = Future()
        reply.set_result(encode(packed_reply(Reply(packet.header["client"]))))
        return reply


def test_at_most_four_messages_for_each_worker_run_ahead():
    asked, names = [], [f"client-{i:02}" for i in range(40)]
    replies = DistributedEngine([Replying(asked), Replying(asked)], names, {}).round(
        {name: Message() for name in names}
    )
    assert next(replies).client == names[0]
    assert asked == names[:8]
    assert [reply.client for reply in replies] == names[1:]
    assert asked == names


class Silent:
    """A worker without a process, which never replies."""

    def __init__(self):
        self.asked = []

    def ask(self, packet):
        self.asked.append(Future())
        return self.asked[-1]


def test_no_message_is_sent_past_the_deadline():
    started, worker = [], Silent()
    engine = DistributedEngine([worker], "abcdef", {}, started.append)
    replies = list(engine.round(dict.fromkeys("abcdef", Message()), deadline=0.01))
    assert ["deadline" in reply.error for reply in replies] == 6 * [True]
    assert started == ["a", "b", "c", "d"]
    assert all(request.cancelled() for request in worker.asked)


def test_client_error_has_a_code_and_no_text(workers):
    check_raises(lambda cfg: engine(workers, cfg))


@pytest.mark.slow
def test_late_client_and_reply_are_rejected(workers):
    cfg = tiny.settings("fedavg", seed=LATE)
    one, asked = engine(workers, cfg), messages(cfg)
    tiny.check_errors(one.round(asked, deadline=1.0), None, "deadline", None)
    assert [reply.error for reply in one.round(asked)] == [None, None, None]


@pytest.mark.slow
def test_a_dead_worker_ends_the_run_and_the_other_workers(tmp_path):
    cfg, begun, others = tiny.settings("fedavg", seed=DIES), [], children(os.getpid())

    def run():
        with two_workers(tmp_path) as workers:
            one = engine(workers, cfg)
            begun.extend(children(os.getpid()).keys() - others.keys())
            list(one.round(messages(cfg)))

    with pytest.raises(RunError, match=r"worker-2 .*SIGKILL; .*: this$"):
        run()
    assert len(begun) == 2
    assert gone(begun)


class GoneAfterTheHeader:
    """A socket that the peer closes after it has read a header."""

    def __init__(self):
        self.sent = 0

    def sendall(self, data):
        if self.sent:
            raise BrokenPipeError
        self.sent += len(data)


def test_frame_without_a_body_is_sent_at_once():
    """A peer that has read the header may have replied and closed the socket."""
    end = GoneAfterTheHeader()
    frames.send(end, {"ask": 1})
    assert end.sent > 0
    with pytest.raises(frames.ConnectionLost):
        frames.send(GoneAfterTheHeader(), {"ask": 1}, b"body")
