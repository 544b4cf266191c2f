"""Messages arrive bit for bit; damaged ones are refused."""

import json
import math
from dataclasses import fields

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from uefl.engines import bounds
from uefl.engines.base import Expected, Message, Reply, expected_like
from uefl.engines.codec import Packet, Unreadable, message_of, packed_message, packed_reply, reply_of
from uefl.engines.flower.records import on_records, pack, unpack

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        assert torch.equal(
            a[name].contiguous().view(-1).view(torch.uint8), b[name].contiguous().view(-1).view(torch.uint8)
        )


def test_a_message_comes_back():
    tensors = {str(dtype): (torch.randn(3, 5) * 3).to(dtype) for dtype in DTYPES}
    odd = {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "": torch.ones(2),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    odd["special"] = torch.tensor([math.nan, math.inf, -0.0, 1e-45])
    options = {"seed": 2**62 + 1, "round": 0, "train": True, "ask": "1/2/3", "rate": 0.1, "nothing": math.nan}
    message = Message(
        tensors,
        options,
        expected_like(tensors) | {"s": Expected((), torch.int64)},
        odd,
        {"z": torch.ones(1), "a": torch.ones(1)},
    )
    header, parts = unpack(pack(packed_message(message, {"client": "silo-0"})))
    assert header["client"] == "silo-0"
    found = message_of(Packet(header, parts))
    for part in ("tensors", "private", "reference"):
        same(getattr(message, part), getattr(found, part))
    assert repr(found.options) == repr(options)
    assert [type(value) for value in found.options.values()] == [type(value) for value in options.values()]
    assert found.expects == message.expects


def test_a_reply_comes_back():
    reply = Reply(
        "silo-1",
        7,
        {"values": torch.randn(9)},
        {"loss": 0.1 + 0.2, "counts": [1, 2], "empty": [], "lost": math.nan},
        None,
        {"own": torch.ones(2)},
        {"train_loss": 0.1},
    )
    reply.states = [32 * "a", ""]
    found = reply_of(unpack(pack(packed_reply(reply))))
    same(reply.tensors, found.tensors)
    same(reply.private, found.private)
    assert (found.client, found.examples, found.error) == ("silo-1", 7, None)
    assert repr(found.metrics) == repr(reply.metrics)
    assert found.states == reply.states
    assert found.training == reply.training
    # none is forgotten
    assert all(getattr(found, field.name) or field.name == "error" for field in fields(Reply))


def test_what_arrives_may_be_written_to():
    _, parts = unpack(pack(Packet({}, {"part": {"x": torch.zeros(3)}})))
    parts["part"]["x"] += 1


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (3,), "uefl.raw", bytes(11)),
        Array("float32", (-3, -1), "uefl.raw", bytes(12)),
        Array("object", (1,), "uefl.raw", bytes(8)),
        Array("float32", (3,), "numpy.ndarray", bytes(12)),
    ],
    ids=["too short", "negative", "no number", "stored otherwise"],
)
def test_a_damaged_tensor_is_refused(array):
    records = pack(Packet({}, {"part": {"x": torch.zeros(3)}}))
    records["part"] = ArrayRecord({"x": array})
    with pytest.raises(Unreadable):
        unpack(records)


def test_a_reply_that_cannot_be_packed_is_a_fault(caplog):
    for header, parts in (
        ({"client": "a", "value": object()}, {}),
        ({"client": "a"}, {"update": {"x": torch.zeros(2, dtype=torch.complex64)}}),
    ):
        found = Packet(header, parts)
        reply = reply_of(unpack(on_records(lambda packet, found=found: found)(pack(Packet({}, {})))))
        assert (reply.client, reply.error) == ("a", "program")
    assert "packed" in caplog.text


def test_what_is_no_message_is_refused():
    for records in (
        RecordDict(),
        RecordDict({"header": ConfigRecord({"json": "no json"})}),
        RecordDict({"header": ConfigRecord({"json": "[]"})}),
        RecordDict({"header": ConfigRecord({"json": "[" * 100_000})}),
    ):
        with pytest.raises(Unreadable):
            unpack(records)
    with pytest.raises(Unreadable):
        message_of(Packet({}, {}))
    for field, value in {
        "examples": "7",
        "client": 3,
        "metrics": {"loss": "0.1"},
        "training": {"loss": []},
        "error": 5,
    }.items():
        plain = {"client": "a", "examples": 1, "metrics": {}, "training": {}, "error": None} | {field: value}
        with pytest.raises(Unreadable):
            reply_of(unpack(pack(Packet(plain, {"update": {}, "private": {}}))))


def test_a_name_that_is_repeated_copies_nothing():
    content = pack(Packet({}, {"update": {"a": torch.zeros(3)}}))
    header = json.loads(content.config_records["header"]["json"])
    content.config_records["header"]["json"] = json.dumps(header | {"tensors": {"update": ["a", "a"]}})
    with pytest.raises(Unreadable):
        unpack(content)


def test_a_header_that_is_too_long_is_not_read(monkeypatch):
    records = pack(Packet({"client": "silo-0"}, {}))
    assert unpack(records)
    monkeypatch.setattr(bounds, "HEADER", 10)
    with pytest.raises(Unreadable):
        unpack(records)
