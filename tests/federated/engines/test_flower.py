"""Flower's engine over a link in memory: the same numbers as the local engine, and failures of clients."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.federated import tiny
from tests.federated.deploy.silos_in_memory import program
from tests.federated.engines.conformance import check_same, every_case, federation, messages, settings
from tests.federated.engines.memory_link import MemoryLink
from uefl.deploy.setting import Setting, greeting, task
from uefl.engines import bounds
from uefl.engines.base import Message, Reply
from uefl.engines.codec import Packet, packed_reply, reply_of
from uefl.engines.faults import NOT_READ
from uefl.engines.flower import LARGE, TORN
from uefl.engines.flower.engine import ClientNodes, FlowerEngine


def programs(federation, **fail):
    return {i: program(federation, name, fail.get(name)) for i, name in enumerate(federation.by_name, 10)}


def engine(cfg, federation, nodes, started=lambda name: None):
    there = MemoryLink(nodes)
    roster = ClientNodes(there, greeting(cfg), lambda report: report[0]["error"])
    for _ in range(2):
        roster._looked = 0.0
        roster.refresh()
    return FlowerEngine(there, roster, task(Setting.of(cfg, federation, 0), "arm"), started), there


@every_case
def test_every_algorithm_is_the_same_bit_for_bit(case):
    cfg = settings(case)
    fed = federation(cfg)
    check_same(cfg, engine(cfg, fed, programs(fed))[0])


@pytest.fixture
def run():
    return tiny.settings("fedavg"), tiny.federation()


def test_replies_come_by_name(run):
    started = []
    one, _ = engine(*run, programs(run[1]), started.append)
    assert one.clients() == ["silo-0", "silo-1", "silo-2"]
    two = {name: message for name, message in messages(run[0]).items() if name != "silo-1"}
    replies = [(reply.error, reply.client) for reply in one.round(two)]
    assert [error for error, _ in replies] == [None, None]
    assert [client for _, client in replies] == started == ["silo-0", "silo-2"]


ERRORS = {
    "computation": RuntimeError("patient 7"),
    "memory": torch.OutOfMemoryError("patient 7"),
    "program": KeyError("patient 7"),
}


@pytest.mark.parametrize("code", ERRORS)
def test_client_error_has_a_code_and_no_text(run, code, caplog):
    federation = run[1]
    cfg = tiny.settings("fedavg", quorum=0.5)
    flower, _ = engine(cfg, federation, programs(federation, **{"silo-1": ERRORS[code]}))
    arm, _, notices = tiny.arm(cfg, federation, lambda local: flower)
    arm.turn()
    (line,) = arm.rejected
    assert code in line["reason"]
    assert any("rejected silo-1" in line and code in line for line in notices)
    assert not any("patient" in line for line in notices)
    assert "Traceback" in caplog.text


def test_unreadable_and_foreign_replies_are_rejected(run):
    cfg, federation = run
    nodes = programs(federation)
    honest = dict(nodes)

    def instead(node, reply):
        nodes[node] = lambda packet: honest[node](packet) if packet.header["ask"] == "report" else reply

    instead(10, Packet({"client": "silo-0"}, {}))
    instead(11, packed_reply(Reply("silo-0", 48)))
    instead(12, packed_reply(Reply("silo-2", error="<script>")))
    one, _ = engine(cfg, federation, nodes)
    replies = list(one.round({name: Message() for name in one.clients()}))
    tiny.check_errors(replies, "read", "client", "(fault unknown;")
    assert "script" not in replies[2].error


def test_a_silent_client_is_rejected_at_the_deadline(run):
    cfg, federation = run
    nodes = programs(federation)
    honest = nodes[11]
    nodes[11] = lambda packet: honest(packet) if packet.header["ask"] == "report" else None
    one, _ = engine(cfg, federation, nodes)
    tiny.check_errors(one.round(messages(cfg), deadline=1.0), None, "deadline", None)


@pytest.mark.parametrize(("deadline", "word"), [(2.5, "deadline"), (4.5, None)])
def test_reply_after_the_deadline_is_rejected(run, monkeypatch, deadline, word):
    """Each poll of the link takes a second, and the replies come with the fourth poll."""
    cfg, federation = run
    one, there = engine(cfg, federation, programs(federation))
    looks, replies = [], there.arrived
    monkeypatch.setattr(
        "uefl.engines.flower.engine.time", SimpleNamespace(monotonic=lambda: float(len(looks)))
    )
    monkeypatch.setattr(
        there, "arrived", lambda *args: looks.append(args) or (replies(*args) if len(looks) > 3 else {})
    )
    tiny.check_errors(one.round(messages(cfg), deadline=deadline), word, word, word)


def test_a_returning_client_gets_its_message_again(run, monkeypatch):
    cfg, federation = run
    asked = messages(cfg)
    one, there = engine(cfg, federation, programs(federation))
    program = there.nodes_there.pop(12)
    monkeypatch.setattr("uefl.engines.flower.engine._RETURN", 0.1)
    tiny.check_errors(one.round(asked), None, None, "gone")

    def dies(packet):  # a new process of the silo connects as another node
        there.nodes_there[20], there.activated[20] = program, "2"
        one._roster._looked = 0.0

    there.nodes_there[12] = dies
    assert [reply.error for reply in one.round(asked, deadline=60)] == [None, None, None]
    assert there.log[-1] == 20
    assert [reply.error for reply in one.round(asked)] == [None, None, None]


def test_clients_whose_nodes_were_unregistered_are_gone(run, monkeypatch):
    """The round ends even without a deadline."""
    cfg, federation = run
    one, there = engine(cfg, federation, programs(federation))
    program, there.unregistered = there.nodes_there[10], {10, 11}
    monkeypatch.setattr("uefl.engines.flower.engine._RETURN", 0.1)
    tiny.check_errors(one.round(messages(cfg)), "gone", "gone", None)
    there.nodes_there[20], there.activated[20] = program, "2"
    one._roster._looked = 0.0
    one._roster.refresh()
    tiny.check_errors(one.round(messages(cfg)), None, "gone", None)


def test_a_node_that_is_unregistered_as_it_is_greeted_is_skipped(run):
    cfg, federation = run
    there = MemoryLink(programs(federation))
    there.unregistered = {10}
    roster = ClientNodes(there, greeting(cfg), lambda report: None)
    roster.refresh()
    assert sorted(roster.nodes) == ["silo-1", "silo-2"]
    assert roster.refused == {}


@pytest.mark.parametrize("why", [TORN, NOT_READ])
def test_an_incomplete_reply_is_requested_once_more(run, why):
    cfg, federation = run
    asked = messages(cfg)
    one, there = engine(cfg, federation, programs(federation))
    there.torn[11], there.why = 1, why
    assert [reply.error for reply in one.round(asked)] == [None, None, None]
    there.torn[11] = 2
    tiny.check_errors(one.round(asked), None, why, None)


def test_too_large_reply_is_requested_once_more(run, monkeypatch):
    """Another reply may have filled the memory while this reply arrived."""
    cfg, federation = run
    monkeypatch.setattr(bounds, "HEADER", 20_000)
    asked = messages(cfg)
    nodes = programs(federation)
    honest = nodes[11]

    def swollen(packet):
        reply = reply_of(honest(packet))
        reply.private["mine"] = torch.zeros(bounds.largest_reply(asked["silo-1"]), dtype=torch.uint8)
        return packed_reply(reply)

    one, there = engine(cfg, federation, nodes)
    there.nodes_there[11] = swollen
    tiny.check_errors(one.round(asked), None, LARGE, None)
    assert list(there.log)[-4:] == [10, 11, 12, 11]


def test_too_large_report_is_refused(run, monkeypatch):
    cfg, federation = run
    monkeypatch.setattr(bounds, "REPORT", 300)
    roster = ClientNodes(MemoryLink(programs(federation)), greeting(cfg), lambda report: None)
    roster.refresh()
    assert roster.nodes == {}
    assert all("silo" in why for why in roster.refused.values())
    assert roster.refused


def test_a_node_that_ends_as_it_is_greeted_is_not_a_stranger(run):
    cfg, federation = run
    there = MemoryLink(programs(federation))
    there.activated[40] = "1"  # the list names node 40, which has gone
    roster = ClientNodes(there, greeting(cfg), lambda report: None)
    roster.refresh()
    assert roster.refused == {}
    assert sorted(roster.nodes) == ["silo-0", "silo-1", "silo-2"]


@pytest.mark.parametrize("bound", [True, False])
def test_a_name_that_is_taken(run, bound):
    """A node with a key is always the same node, so its name never moves.

    Without keys, the newest node with a name is the client.
    """
    cfg, federation = run
    there = MemoryLink(programs(federation))
    roster = ClientNodes(there, greeting(cfg), lambda report: None, bound={} if bound else None)
    roster.refresh()
    there.nodes_there[30], there.activated[30] = there.nodes_there[10], "2"
    roster._looked = 0.0
    assert roster.refresh() == ([] if bound else ["silo-0"])
    assert roster.nodes["silo-0"] == (10 if bound else 30)
    assert sorted(roster.refused) == ([30] if bound else [])
    assert all(re.search("'silo-0' .*key; .*--name", why) for why in roster.refused.values())


def test_a_key_has_one_name(run):
    """With several names for a key, a node could return under other names and be many clients."""
    cfg, federation = run
    there = MemoryLink(programs(federation))
    roster = ClientNodes(there, greeting(cfg), lambda report: None, bound={})
    roster.refresh()
    there.nodes_there[10] = lambda packet: Packet({"client": "silo-9", "error": None}, {})
    there.activated[10] = "2"
    roster._looked = 0.0
    assert roster.refresh() == []
    assert list(roster.refused) == [10]
    assert re.search("'silo-9' .*key .*'silo-0'", roster.refused[10])
    assert sorted(roster.nodes) == ["silo-0", "silo-1", "silo-2"]


def test_messages_of_another_client_or_version_are_rejected(run):
    cfg, federation = run
    program = programs(federation)[10]
    head = task(Setting.of(cfg, federation, 0), "arm")
    for other, error in (
        ({"client": "silo-1"}, "misdirected"),
        ({"uefl": "0.0"}, "version"),
        ({"client": "silo-0"}, "unreadable"),
    ):
        assert program(Packet(head | other, {})).header["error"] == error
