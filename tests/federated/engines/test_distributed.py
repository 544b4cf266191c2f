"""Real workers: the numbers of the local engine, and failures of clients and workers."""

import shutil
from contextlib import contextmanager

import pytest

from tests.federated import tiny
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
from uefl.deploy.workers import on_workers
from uefl.engines import frames
from uefl.engines.base import Message, Reply
from uefl.engines.codec import packed_reply
from uefl.engines.distributed.engine import DistributedEngine
from uefl.errors import RunError
from uefl.lazy import Lazy


@contextmanager
def two_workers():
    with on_workers(2, "cpu", lambda line: None, "this", "tests.federated.engines.tiny_worker") as started:
        yield started
        folder = started._processes.folder
    shutil.rmtree(folder, ignore_errors=True)  # the logs stay where they tell of an error


@pytest.fixture(scope="module")
def workers():
    with two_workers() as started:
        yield started


def engine(workers, cfg, started=lambda name: None):
    workers.take(cfg, federation(cfg))
    return workers.engine("arm", started)


@pytest.mark.slow
@every_case
def test_every_algorithm_is_the_same_bit_for_bit(workers, case):
    cfg = settings(case)
    check_same(cfg, engine(workers, cfg))


def test_replies_are_named_and_a_worker_gets_the_model_once(workers, monkeypatch):
    cfg, started, sent = tiny.settings("fedavg"), [], []
    one = engine(workers, cfg, started.append)
    ask = one._workers.ask
    monkeypatch.setattr(
        one._workers,
        "ask",
        lambda rank, packet: sent.append((rank, list(packet.parts["broadcast"]))) or ask(rank, packet),
    )
    assert one.clients() == ["silo-0", "silo-1", "silo-2"]
    replies = [(reply.error, reply.client) for reply in one.round(messages(cfg))]
    assert replies == [(None, "silo-0"), (None, "silo-1"), (None, "silo-2")]
    assert sorted(started) == one.clients()
    assert sorted(sent) == [(1, []), (1, ["values", "buffers"]), (2, ["values", "buffers"])]


def test_a_tensor_that_was_changed_in_place_is_sent_again(workers):
    cfg = tiny.settings("fedavg")
    one, asked = engine(workers, cfg), messages(cfg)
    values = asked["silo-0"].tensors["values"]
    ways = [[], []]
    for changed, found in enumerate(ways):
        message = {"silo-0": asked["silo-0"], "silo-2": asked["silo-2"]}  # of one worker
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


class SecondIsFaster:
    """A pool of two workers without processes. Worker 1 replies only when worker 2 has no message."""

    ranks = range(1, 3)

    def __init__(self):
        self.asked, self._busy = [], {}

    def idle(self, rank):
        return rank not in self._busy

    def ask(self, rank, packet):
        self.asked.append(packet.header["client"])
        self._busy[rank] = (len(self.asked), packet.header["client"])
        return len(self.asked)

    def reply(self, seconds):
        number, client = self._busy.pop(max(self._busy))
        return number, packed_reply(Reply(client))


def test_at_most_four_messages_for_each_worker_run_ahead():
    pool, names = SecondIsFaster(), [f"client-{i:02}" for i in range(40)]
    replies = DistributedEngine(pool, names, {}).round({name: Message() for name in names})
    assert next(replies).client == names[0]
    assert pool.asked == [names[i] for i in (0, 1, 3, 5, 7)]
    assert [reply.client for reply in replies] == names[1:]


def test_client_error_has_a_code_and_no_text(workers):
    check_raises(lambda cfg: engine(workers, cfg))


@pytest.mark.slow
def test_late_client_and_reply_are_dropped(workers):
    cfg = tiny.settings("fedavg", seed=LATE)
    one, asked = engine(workers, cfg), messages(cfg)
    tiny.check_errors(one.round(asked, deadline=1.0), None, "deadline", None)
    assert [reply.error for reply in one.round(asked)] == [None, None, None]


@pytest.mark.slow
def test_a_dead_worker_ends_the_run_and_the_other_workers():
    cfg, begun = tiny.settings("fedavg", seed=DIES), []

    def run():
        with two_workers() as workers:
            one = engine(workers, cfg)
            begun.extend(workers._processes.all.values())
            list(one.round(messages(cfg)))

    with pytest.raises(RunError, match=r"worker-2 .*SIGKILL; .*: this$"):
        run()
    assert [process.poll() is not None for process in begun] == [True, True]


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
