"""The program of a run between a Grid and the process of the run: replies of silos, whatever they are."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import count

import pytest
import torch

pytest.importorskip("flwr")

import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from uefl.deploy.app import client
from uefl.engines import frames
from uefl.engines.codec import Packet, decode, encode
from uefl.engines.faults import NOT_READ
from uefl.engines.flower import BARRED, GONE, LARGE, SILO, TORN
from uefl.engines.flower.address import Unreachable
from uefl.engines.flower.link import Link, Node
from uefl.engines.flower.messenger import Messenger, frame_of, records_of


def pack(packet):
    """Return a packet as the records of a message."""
    return records_of(encode(packet))


def unpack(records):
    """Return the packet of records."""
    return decode(bytearray(frame_of(records, 2**20)))


class OneNode(Grid):
    """A Grid with node 7.

    ``reply`` is a function of a message: records, or the code of an error of Flower's.
    """

    def __init__(self, reply):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self._reply, self._sent, self._count = reply, {}, count()

    def set_run(self, run): ...

    @property
    def run(self):
        return None

    def create_message(self, *arguments, **keys):
        raise NotImplementedError

    def send_and_receive(self, *arguments, **keys):
        raise NotImplementedError

    def get_node_ids(self):
        return [7]

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            there = message.metadata.dst_node_id == 7
            numbers.append(f"number {next(self._count)}" if there else None)
            self._sent |= {numbers[-1]: message} if there else {}
        return numbers

    def pull_messages(self, message_ids):
        for number in message_ids:
            message = self._sent.pop(number, None)
            if message is not None:
                yield FlowerReply(self._reply(message))


class TwoNodes(OneNode):
    """Two nodes.

    The replies of node 8 do not end before ``released`` is set.
    """

    released = threading.Event()

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            numbers.append(f"number {next(self._count)}")
            self._sent[numbers[-1]] = message
        return numbers

    def pull_messages(self, message_ids):
        (number,) = message_ids
        if number in self._sent and self._sent[number].metadata.dst_node_id == 8:
            self.released.wait()
        return super().pull_messages(message_ids)


class OneMemory(TwoNodes):
    """Two nodes.

    Replies of node 8 to a message with ``bomb`` fill the memory for a moment. A reply that is read at this
    moment is lost.
    """

    full = 0

    def pull_messages(self, message_ids):
        (number,) = message_ids
        message = self._sent.pop(number, None)
        if message is None:
            return
        bomb = message.metadata.dst_node_id == 8 and unpack(message.content).header["bomb"]
        OneMemory.full += bomb
        lost = False
        for _ in range(20 if bomb else 10):
            lost |= OneMemory.full > 0
            time.sleep(0.01)
        OneMemory.full -= bomb
        if lost:
            raise MemoryError
        yield FlowerReply(self._reply(message))


class FailingSuperLink(OneNode):
    """A SuperLink that fails at the first two requests of each kind."""

    def __init__(self, reply):
        super().__init__(reply)
        self._failures = dict.fromkeys(("get_nodes", "push", "pull"), 2)

    def _fail(self, request):
        self._failures[request] -= 1
        if self._failures[request] >= 0:
            raise httpx.HTTPStatusError("error 500", request=None, response=httpx.Response(500))

    def get_nodes(self):
        self._fail("get_nodes")
        return super().get_nodes()

    def push_messages(self, messages):
        self._fail("push")
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        self._fail("pull")
        return super().pull_messages(message_ids)


class FlowerReply:
    """A message, as far as it is read.

    A silo may write anything into its metadata.
    """

    def __init__(self, reply):
        self.error = Error(reply) if isinstance(reply, int) else None
        self.content = reply

    def has_error(self):
        return self.error is not None


@contextmanager
def run(reply, bounded=False, grid=OneNode):
    """Start a run over its nodes.

    Returns a list that gets the exception of the run's program, if there is one.
    """
    here, there = socket.socketpair()
    ended = []

    def work():
        with there:
            try:
                Messenger(grid(reply), there, bounded).work()
            except Exception as error:
                ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    messages = Link(here, "there:1")
    try:
        yield messages, ended
    finally:
        messages.close()
        thread.join()


MOST = 2**30  # bytes


def reply_of(reply):
    with run(reply) as (messages, _):
        number = messages.push(7, Packet({"ask": "work"}, {}), None, MOST)
        return messages.arrived([number], 10.0)[number]


def test_each_object_of_a_large_message_is_small():
    """A proxy may refuse larger requests: Flower sends each object in a request of its own."""

    def objects(one):
        yield one
        for child in (one.children or {}).values():
            yield from objects(child)

    frame = encode(Packet({"client": 2**23 * "a"}, {"update": {"x": torch.randn(2**22)}}))
    sizes = [len(one.deflate()) for one in objects(records_of(frame))]
    assert sum(sizes) > len(frame) > 2**24
    assert max(sizes) < 6 * 2**20


def test_message_is_sent_and_its_reply_returned():
    def reply(message):
        assert message.metadata.message_type == "train"
        assert message.metadata.ttl == 9.0
        header, groups = unpack(message.content)
        return pack(Packet(header | {"heard": True}, {"update": {"x": groups["broadcast"]["x"] + 1}}))

    with run(reply) as (messages, _):
        assert messages.nodes() == [Node(7, "", "")]
        sent = Packet({"ask": "work"}, {"broadcast": {"x": torch.arange(3.0)}})
        number = messages.push(7, sent, 9.0, MOST)
        (header, groups) = messages.arrived([number], 10.0)[number]
        assert header == {"ask": "work", "heard": True}
        assert groups["update"]["x"].tolist() == [1, 2, 3]
        assert messages.push(8, sent, 9.0, MOST) is None
        assert messages.arrived([number], 0.0) == {}


def test_no_other_silo_can_guess_the_name_of_a_message():
    """Flower names a message by a hash of its content, and takes a reply to it from every node."""
    names = []
    with run(lambda message: names.append(message.content.object_id) or message.content) as (messages, _):
        numbers = [messages.push(7, Packet({"ask": "work"}, {}), 9.0, MOST) for _ in range(2)]
        for number in numbers:
            assert messages.arrived([number], 10.0)[number].header == {"ask": "work"}
    assert len(set(names)) == 2


def test_replies_wait_and_forgotten_ones_are_dropped():
    with run(lambda message: message.content) as (messages, _):
        numbers = [messages.push(7, Packet({"i": i}, {}), None, MOST) for i in range(4)]
        messages.forget(numbers[:2])
        assert messages.arrived(numbers[2:3], 10.0)[numbers[2]].header == {"i": 2}
        assert messages.arrived(numbers[3:], 10.0)[numbers[3]].header == {"i": 3}
        assert messages.arrived(numbers, 0.0) == {}


def _raises(error):
    def reply(message):
        raise error

    return reply


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (lambda message: 5, GONE),
        (lambda message: 3, TORN),
        (lambda message: 8, "no reply (Flower's error 8)"),
        (lambda message: RecordDict(), NOT_READ),
        (_raises(MemoryError()), LARGE),
        (_raises(TypeError("a silo made Flower raise it")), NOT_READ),
    ],
    ids=["gone", "torn", "crashed", "empty", "memory", "malformed"],
)
def test_invalid_reply_is_a_reason(reply, why):
    assert reply_of(reply) == why


def test_a_failure_of_the_network_ends_the_run():
    with run(_raises(httpx.ConnectError("away"))) as (messages, ended):
        number = messages.push(7, Packet({}, {}), None, MOST)
        with pytest.raises(Unreachable, match=r"SuperLink .*there:1"):
            messages.arrived([number], 10.0)
    assert isinstance(ended[0], httpx.ConnectError)


def test_a_failure_of_the_superlink_delays_the_run():
    with run(lambda message: message.content, grid=FailingSuperLink) as (messages, _):
        assert messages.nodes() == [Node(7, "", "")]
        number = messages.push(7, Packet({"i": 1}, {}), None, MOST)
        assert messages.arrived([number], 20.0)[number].header == {"i": 1}


@pytest.mark.parametrize("bombs", ["111111", "101010"])
def test_a_reply_that_fills_the_memory_costs_no_other_reply(bombs):
    """After the first one, the replies of its node are read alone.

    After four in a row, they are not read.
    """
    found = {7: [], 8: []}
    with run(lambda message: message.content, grid=OneMemory) as (messages, _):
        for bomb in map(int, bombs):
            packet = Packet({"bomb": bomb}, {})
            numbers = {messages.push(node, packet, None, MOST): node for node in (8, 7)}
            while numbers:
                for number, one in messages.arrived(numbers, 10.0).items():
                    found[numbers.pop(number)].append(one if isinstance(one, str) else None)
    assert found[8] == ([LARGE] * 4 + [BARRED] * 2 if bombs == "111111" else [LARGE, None] * 3)
    assert found[7][1:] == [None] * 5


def test_a_forgotten_reply_is_not_requested(monkeypatch):
    """A silo could send it at any later time, to fill the memory."""
    requests = []

    def no_reply(self, message_ids):
        requests.extend(message_ids)
        return iter([])

    monkeypatch.setattr(OneNode, "pull_messages", no_reply)
    with run(None) as (messages, _):
        late, awaited = (messages.push(7, Packet({}, {}), None, MOST) for _ in range(2))
        messages.arrived([late], 0.5)
        messages.forget([late])
        messages.arrived([awaited], 0.5)
        requests.clear()
        messages.arrived([awaited], 1.5)
    assert set(requests) == {awaited}


def test_failed_run_raises_a_runtime_error():
    with run(_raises(ValueError)) as (messages, ended):
        messages.fail()
    assert isinstance(ended[0], RuntimeError)


def test_too_large_reply_is_not_passed_on():
    packet = Packet({"client": "a"}, {"update": {"x": torch.zeros(1000)}})
    for most, is_packet in ((5000, True), (4000, False)):
        with run(lambda message: pack(packet)) as (messages, _):
            number = messages.push(7, Packet({}, {}), None, most)
            found = messages.arrived([number], 10.0)[number]
            assert isinstance(found, Packet) == is_packet
            assert is_packet or found == LARGE


def test_replies_that_never_end_delay_no_other(monkeypatch):
    """A silo attacks by sending its replies drop by drop, so that they take the threads of all replies."""
    monkeypatch.setattr("uefl.engines.flower.messenger._SLOW", 0.1)
    threads = threading.active_count()
    with run(lambda message: message.content, grid=TwoNodes) as (messages, _):
        try:
            slow = [messages.push(8, Packet({"i": i}, {}), None, MOST) for i in range(40)]
            for i in range(3):
                number = messages.push(7, Packet({"i": i}, {}), None, MOST)
                assert messages.arrived([number], 60.0)[number].header == {"i": i}
            assert threading.active_count() - threads < 40
        finally:
            TwoNodes.released.set()
        found = {}
        while len(found) < len(slow):
            found |= messages.arrived(slow, 60.0)


def swell(message):
    """Return a message of a few bytes on the wire and 2 GiB in memory."""
    return RecordDict() if len(bytearray(2**31)) else None


def _bomb():
    """Decode the message in a separate process with a memory limit."""
    with run(swell, bounded=True) as (messages, _):
        number = messages.push(7, Packet({}, {}), None, 2**20)
        print(messages.arrived([number], 60.0)[number])
        number = messages.push(7, Packet({}, {}), None, 2**30)
        print(messages.arrived([number], 60.0)[number])


def _greeting_in_a_round():
    """Send a large message, and then one with a small reply before the reply to the first one is read."""
    sent, model = threading.Event(), torch.zeros(5 * 2**23)

    def reply(message):
        sent.wait(30)
        return swell(message)

    with run(reply, bounded=True) as (messages, _):
        messages.push(7, Packet({}, {}), None, 2**20)
        large = messages.push(7, Packet({}, {"x": {"a": model}}), None, 2**30)
        messages.push(7, Packet({}, {}), None, 2**20)
        sent.set()
        print(messages.arrived([large], 60.0)[large])


def _output_of(function):
    command = [sys.executable, "-c", f"import {__name__} as test; test.{function.__name__}()"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.splitlines() or found.stderr


def test_reply_that_expands_in_memory_is_not_decoded():
    """The limit of memory rejects the reply.

    With a larger limit, the reply is decoded.
    """
    assert _output_of(_bomb) == [LARGE, NOT_READ]


def test_a_message_with_a_small_reply_keeps_the_limit_of_others():
    """A silo that connects during a round is greeted, with a small limit."""
    assert _output_of(_greeting_in_a_round) == [NOT_READ]


class OneConnection:
    """The process of a silo, which replies to one connection and keeps its frame."""

    def __init__(self, folder, reply):
        self.frame = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "silo"))
        self._listener.listen()
        self._reply = reply
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self):
        end, _ = self._listener.accept()
        with end, self._listener:
            _, self.frame = frames.receive(end)
            if self._reply is not None:
                frames.send(end, None, self._reply)


def asked(records, life=None):
    """Return the reply of the ClientApp to a message."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(records, 7, "train", ttl=life)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message, client(message, Context(1, 7, {}, RecordDict(), {}))


@pytest.mark.parametrize(
    "records", [pack(Packet({"ask": 1}, {"x": {"a": torch.ones(3)}})), RecordDict()], ids=["ours", "other"]
)
def test_the_client_app_passes_messages_to_the_silo(tmp_path, monkeypatch, records):
    """The app passes an unreadable message as an empty frame.

    The reply expires with the message.
    """
    monkeypatch.setenv(SILO, str(tmp_path / "silo"))
    silo = OneConnection(tmp_path, encode(Packet({"heard": 1}, {})))
    message, reply = asked(records, life=65.0)
    silo.thread.join()
    assert bytes(silo.frame) == (frame_of(records, 2**20) if records else b"")
    assert unpack(reply.content).header == {"heard": 1}
    assert (reply.metadata.ttl, reply.metadata.created_at) == (65.0, message.metadata.created_at)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id


@pytest.mark.parametrize("there", [False, True])
def test_a_silo_that_has_ended_sends_no_reply(tmp_path, monkeypatch, there):
    """The server asks the next process of the silo."""
    monkeypatch.setenv(SILO, str(tmp_path / "silo"))
    silo = OneConnection(tmp_path, None) if there else None
    with pytest.raises(SystemExit):
        asked(RecordDict())
    if silo is not None:
        silo.thread.join()
