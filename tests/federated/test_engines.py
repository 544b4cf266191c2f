import pytest
import torch

from uefl.engines.base import Message, Reply
from uefl.engines.in_process import LocalEngine

from .tiny import check_errors


def work(name, value=1.0):
    return lambda message: Reply(name, 1, {"x": torch.tensor([value])})


def test_replies_come_sorted_by_name_and_lazily():
    started = []
    engine = LocalEngine({n: work(n) for n in ("silo-2", "silo-0", "silo-1")}, started=started.append)
    assert engine.clients() == ["silo-0", "silo-1", "silo-2"]
    replies = engine.round({n: Message() for n in ("silo-1", "silo-0")})
    assert started == []
    assert next(replies).client == "silo-0"
    assert started == ["silo-0"]
    assert [r.client for r in replies] == ["silo-1"]


def test_failed_client_loses_only_its_own_reply():
    def broken(message):
        raise RuntimeError("first\nsecond")

    replies = list(LocalEngine({"a": broken, "b": work("b")}).round({"a": Message(), "b": Message()}))
    assert [r.error for r in replies] == ["first", None]
    assert replies[0].tensors == {}


def test_clients_behind_the_deadline_are_not_started(monkeypatch):
    clock = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    replies = LocalEngine({"a": work("a"), "b": work("b")}).round(
        {"a": Message(), "b": Message()}, deadline=2.0
    )
    check_errors(replies, None, "deadline")


def test_unknown_client_name_is_an_error():
    with pytest.raises(KeyError):
        list(LocalEngine({}).round({"ghost": Message()}))
