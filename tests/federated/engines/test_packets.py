"""A packet as bytes comes back bit for bit; damaged packets are refused."""

import math

import pytest
import torch

from tests.federated.tiny import same_bits
from uefl.engines.codec import DTYPES, Packet, Unreadable, decode, encode, from_raw
from uefl.engines.layout import Stored

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
    assert list(found.parts) == ["z", "a", "none"]
    same_bits(found.parts["z"], tensors)
    same_bits(found.parts["a"], odd)


def test_received_tensors_share_no_memory_with_sent_ones():
    x = torch.zeros(3)
    decode(encode(Packet({}, {"p": {"x": x}}))).parts["p"]["x"] += 1
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize(
    "damage", [lambda f: f[:-8], lambda f: f[:4], lambda f: f[8:], lambda f: bytearray(len(f))]
)
def test_a_damaged_packet_is_refused(damage):
    with pytest.raises(Unreadable):
        decode(damage(encode(Packet(HEADER, {"p": {"x": torch.ones(4)}}))))


def test_the_name_of_a_tensor_is_a_text():
    with pytest.raises(Unreadable, match="5"):
        decode(encode(Packet(HEADER, {"p": {5: torch.ones(4)}})))


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (2**63, 0), (10**30, 0)])
def test_no_elements_in_a_shape_beyond_all_tensors(shape):
    with pytest.raises(ValueError, match="dimensions"):
        from_raw(Stored("x", "float32", shape, memoryview(b"")))
