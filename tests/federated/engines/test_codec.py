"""Messages arrive bit for bit, and damaged ones are refused."""

import math
from dataclasses import fields

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from tests.federated.tiny import same_bits
from uefl.engines.base import Expected, Message, Reply, expected_like
from uefl.engines.codec import (
    DTYPES,
    Packet,
    Unreadable,
    decode,
    encode,
    message_of,
    packed_message,
    packed_reply,
    reply_of,
)
from uefl.engines.flower.messenger import frame_of, records_of
from uefl.engines.flower.node import reply_to

MOST = 2**20


def pack(packet):
    """Return a packet as the records of a message."""
    return records_of(encode(packet))


def unpack(records):
    """Return the packet that arrives."""
    return decode(bytearray(frame_of(records, MOST)))


def test_message_round_trip():
    tensors = {name: (torch.randn(3, 5) * 3).to(dtype) for name, dtype in DTYPES.items()}
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
    header, groups = unpack(pack(packed_message(message, {"client": "silo-0"})))
    assert header["client"] == "silo-0"
    found = message_of(Packet(header, groups))
    for group in ("tensors", "private", "private_mean"):
        same_bits(getattr(message, group), getattr(found, group))
    assert repr(found.options) == repr(options)
    assert [type(value) for value in found.options.values()] == [type(value) for value in options.values()]
    assert found.expects == message.expects


def test_reply_round_trip():
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
    same_bits(reply.tensors, found.tensors)
    same_bits(reply.private, found.private)
    assert (found.client, found.examples, found.error) == ("silo-1", 7, None)
    assert repr(found.metrics) == repr(reply.metrics)
    assert found.states == reply.states
    assert found.training == reply.training
    # the reply of this test has a value in every field
    assert all(getattr(found, field.name) or field.name == "error" for field in fields(Reply))


def test_a_reply_that_cannot_be_packed_is_a_fault(caplog):
    for header, groups in (
        ({"client": "a", "value": object()}, {}),
        ({"client": "a"}, {"update": {"x": torch.zeros(2, dtype=torch.complex64)}}),
    ):
        found = Packet(header, groups)
        frame = reply_to(lambda packet, found=found: found, bytearray())
        reply = reply_of(decode(frame))
        assert (reply.client, reply.error) == ("a", "program")
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_records_without_a_frame_are_refused():
    for records in (
        RecordDict(),
        RecordDict({"frame": ConfigRecord({"frame": "text"})}),
        RecordDict({"frame": ArrayRecord({})}),
    ):
        with pytest.raises(KeyError):
            frame_of(records, MOST)


def test_invalid_messages_are_refused():
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


@pytest.mark.parametrize(
    "packet", [Packet({"client": 900 * "a"}, {}), Packet({}, {"x": {"a": torch.zeros(250)}})]
)
def test_a_frame_above_its_limit_is_not_made(packet):
    records = pack(packet)
    assert frame_of(records, 2000)
    with pytest.raises(MemoryError):
        frame_of(records, 900)


def test_unreadable_frame_is_passed_on_as_none():
    given = []
    reply_to(lambda packet: given.append(packet) or Packet({}, {}), bytearray())
    assert given == [None]
