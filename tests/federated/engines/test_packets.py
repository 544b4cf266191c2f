"""A packet as bytes comes back bit for bit, and damaged packets are refused."""

import json
import math

import pytest
import torch

from tests.federated.tiny import same_bits
from uefl.engines import codec
from uefl.engines.codec import DTYPES, Packet, Unreadable, decode, encode

HEADER = {"text": 'a "word"\n', "number": 0.1 + 0.2, "nothing": None, "list": [1, math.inf]}


def test_packet_round_trip():
    tensors = {name: (torch.randn(3, 5) * 3).to(dtype) for name, dtype in DTYPES.items()}
    odd = {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "": torch.ones(2, dtype=torch.bool),
        "turned": torch.randn(2, 3).t(),
    }
    found = decode(encode(Packet(HEADER, {"z": tensors, "a": odd, "none": {}})))
    assert found.header == HEADER
    assert list(found.groups) == ["z", "a", "none"]
    same_bits(found.groups["z"], tensors)
    same_bits(found.groups["a"], odd)


def test_received_tensors_share_no_memory_with_sent_ones():
    x = torch.zeros(3)
    decode(encode(Packet({}, {"p": {"x": x}}))).groups["p"]["x"] += 1
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize(
    "damage",
    [lambda f: f[:-8], lambda f: f + bytes(8), lambda f: f[:4], lambda f: f[8:], lambda f: bytearray(len(f))],
)
def test_a_damaged_packet_is_refused(damage):
    with pytest.raises(Unreadable):
        decode(damage(encode(Packet(HEADER, {"p": {"x": torch.ones(4)}}))))


def test_the_name_of_a_tensor_is_a_text():
    with pytest.raises(Unreadable, match="5"):
        decode(encode(Packet(HEADER, {"p": {5: torch.ones(4)}})))


def framed(table, data=bytes(16)):
    """Return a frame with this table of tensors."""
    text = table if isinstance(table, str) else json.dumps({"tensors": {"p": table}})
    padded = text.encode() + bytes(-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + padded + data)


def test_tensors_lie_one_after_the_other():
    found = decode(framed([["x", "int32", [2]], ["y", "int32", [1, 2]]], b"\1\0\0\0" * 4))
    assert {name: tensor.tolist() for name, tensor in found.groups["p"].items()} == {
        "x": [1, 1],
        "y": [[1, 1]],
    }


SHAPES = [[5], [2, 3], [-4], [2, -2], [10**30], [0, -1], [2.0], [True], ["4"], 4, "", None]
SHAPES += [[2**62, 2**62, 0], [2**63, 0], [10**30, 0]]
TABLES = [[["x", "object", [4]]], [["x", "float32"]], [["x", ["float32"], [4]]], {"x": 1}, 5, "no json"]
TABLES += ["[]", "{}", "[" * 100_000, '{"tensors": 5}', '{"tensors": {"p": null}}']


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_shape_that_does_not_match_the_bytes_is_refused(shape):
    with pytest.raises(Unreadable):
        decode(framed([["x", "float32", shape]]))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: str(table)[:20])
def test_a_header_of_another_form_is_refused(table):
    with pytest.raises(Unreadable):
        decode(framed(table))


def test_a_repeated_name_has_bytes_of_its_own():
    """The bytes of a tensor are not copied for each repetition of its name."""
    assert list(decode(framed(2 * [["x", "float32", [2]]])).groups["p"]) == ["x"]
    with pytest.raises(Unreadable):
        decode(framed(3 * [["x", "float32", [2]]]))


def test_many_dimensions_are_not_multiplied():
    """The product of a hundred thousand sizes takes a minute."""
    with pytest.raises(Unreadable, match="100000"):
        decode(framed([["x", "float32", 100_000 * [2**62]]]))


@pytest.mark.parametrize(
    "text", ['{"tensors": [%s]}', '{"tensors": {}, "x": [%s]}', '{"tensors": {"p": [%s]}}']
)
@pytest.mark.parametrize("group", ["[]", "{}", '["x", "uint8", [0]]'])
def test_a_header_of_very_many_lists_is_not_read(text, group, monkeypatch):
    """Empty lists take twenty times more memory than their text."""
    monkeypatch.setattr(codec, "json", None)
    with pytest.raises(Unreadable, match=str(codec._LISTS)):
        decode(framed(text % ", ".join(300_000 * [group])))


def test_a_header_above_its_limit_is_not_read(monkeypatch):
    frame = encode(Packet(HEADER, {}))
    assert decode(frame).header == HEADER
    monkeypatch.setattr(codec, "HEADER", 10)
    with pytest.raises(Unreadable):
        decode(frame)
