"""ExtensibleCodebook: visible codewords, states of optimizers, errors."""

from __future__ import annotations

import copy

import pytest
import torch

from uefl_kernels import vq
from uefl_kernels.nn import ExtensibleCodebook

from .conftest import normal


def codebook(**options):
    torch.manual_seed(0)
    return ExtensibleCodebook(
        torch.randn(6, 4), **({"capacity": 16, "clients": ["north", "silo.2"]} | options)
    )


def test_a_client_sees_the_shared_part_and_its_own():
    codes = codebook()
    assert torch.equal(codes.codebook("north"), codes.codebook("silo.2"))
    first, second = normal(3, 4, seed=1), normal(2, 4, seed=2)
    assert codes.extend("north", first) == 1
    assert codes.extend("north", second) == 2
    assert codes.rows(2, "north") == slice(9, 11)
    assert torch.equal(codes.codebook("north"), torch.cat([codes.part(0, "north"), first, second]))
    assert (codes.size("north"), codes.size("silo.2")) == (11, 6)
    x = normal(2, 5, 8)
    for got, want in zip(codes(x, "north")[:4], vq(x, codes.codebook("north").detach())[:4], strict=True):
        torch.testing.assert_close(got, want)
    assert codes(x, "silo.2").counts.shape == (6,)


@pytest.mark.parametrize("mass", [None, [0.1, 0.3]])
def test_defaults_of_the_caller_change_nothing(mass):
    found = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        codes = codebook()
        codes.extend("north", normal(3, 4, seed=1))
        codes.set_part(1, normal(3, 4, seed=2))
        with torch.no_grad():
            codes.part(0, "north").add_(1)
        with torch.device(device):
            torch.set_default_dtype(dtype)
            try:
                found.append((codes.average(mass=mass), codes.state_dict()["_extra_state"]))
            finally:
                torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, *found))


def test_repr_is_a_line_for_any_number_of_clients():
    codes = codebook(clients=[f"silo {i}" for i in range(200)])
    codes.extend("silo 3", normal(2, 4))
    assert (
        repr(torch.nn.Sequential(codes))
        == "Sequential(\n  (0): ExtensibleCodebook(dim=4, capacity=16, clients=200, parts=2)\n)"
    )


def test_part_of_some_clients_is_averaged_only_by_them():
    codes = codebook(clients=["a", "b", "c"])
    codes.extend("b", normal(2, 4, seed=1))
    group = normal(3, 4, seed=2)
    assert codes.extend(["c", "b"], group) == 2
    assert [sorted(names) for names in codes.part_clients] == [["a", "b", "c"], ["b"], ["b", "c"]]
    assert [codes.size(name) for name in "abc"] == [6, 11, 9]
    assert (codes.rows(2, "b"), codes.rows(2, "c")) == (slice(8, 11), slice(6, 9))
    assert torch.equal(codes.part(2, "b"), group)
    with torch.no_grad():
        codes.part(2, "b").fill_(1)
        codes.part(2, "c").fill_(4)
    before = codes.codebook("b")[:8].clone()
    assert codes.average(2, [2, 1]).unique().item() == 2
    assert (
        codes.part(2, "b").unique().item()
        == codes.part(2, "c").unique().item()
        == codes.part(2).unique().item()
        == 2
    )
    assert torch.equal(codes.codebook("b")[:8], before)


def test_nothing_is_copied():
    codes = codebook()
    address = codes.weights[0].data_ptr()
    codes.extend("north", normal(10, 4))
    assert (
        codes.codebook("north").data_ptr()
        == codes.part(0, "north").data_ptr()
        == codes.weights[0].data_ptr()
        == address
    )


def test_optimizer_keeps_its_state_over_an_extension():
    codes, x = codebook(), normal(200, 4)
    optimizer = torch.optim.Adam(codes.parameters(), lr=0.05)

    def step():
        optimizer.zero_grad()
        codes(x, "north").loss.backward()
        optimizer.step()
        return codes(x, "north").loss.item()

    before = [step() for _ in range(20)][-1]
    moments = optimizer.state[codes.weights[0]]["exp_avg"].clone()
    assert not codes.weights[0][6:].any()
    assert codes.weights[1].grad is None
    codes.extend("north", x[:8])
    assert torch.equal(optimizer.state[codes.weights[0]]["exp_avg"], moments)
    assert [step() for _ in range(20)][-1] < before
    assert codes.weights[0][6:14].any(-1).all()
    assert not codes.weights[0][14:].any()


def test_shared_part_is_averaged():
    codes = codebook()
    with torch.no_grad():
        codes.part(0, "north").fill_(1)
        codes.part(0, "silo.2").fill_(4)
    codes.extend("north", normal(2, 4))
    own = codes.codebook("north")[6:].detach().clone()
    usage = torch.tensor([[0, 1, 2, 3, 1, 1], [0, 0, 1, 0, 1, 1]])
    assert codes.average(mass=usage)[:, 0].tolist() == [2.5, 1, 2, 1, 2.5, 2.5]
    assert torch.equal(codes.part(0, "north"), codes.part(0, "silo.2"))
    assert torch.equal(codes.codebook("north")[6:], own)
    codes.set_part(0, torch.zeros(6, 4))
    with torch.no_grad():
        codes.part(0, "north").fill_(1)
    assert codes.average(0, [3, 1])[0, 0].item() == 0.75
    assert codes.average()[0, 0].item() == 0.75


def test_state_dict_round_trip():
    codes, other = codebook(), codebook()
    codes.extend("silo.2", normal(5, 4))
    other.load_state_dict(codes.state_dict())
    for same in (other, copy.deepcopy(codes)):
        assert torch.equal(same.codebook("silo.2"), codes.codebook("silo.2"))
        assert same.part_clients == codes.part_clients
        assert same.extend("silo.2", normal(1, 4)) == 2
        assert same.rows(2, "silo.2") == slice(11, 12)
    # safetensors saves only tensors
    assert all(isinstance(value, torch.Tensor) for value in codes.state_dict().values())


def test_half_precision_and_compile(full_graph):
    codes = codebook(clients=["one"]).to(torch.bfloat16)
    assert codes.codebook("one").dtype == torch.float32
    x = normal(30, 4, dtype=torch.bfloat16).requires_grad_()
    out = full_graph(codes)(x)
    (out.quantized.float().sum() + out.loss).backward()
    assert out.quantized.dtype == x.grad.dtype == torch.bfloat16
    assert torch.equal(out.indices, codes(x).indices)


def test_refuses():
    with pytest.raises(ValueError, match=r"shared.*capacity=5.*\[6, 4\]"):
        codebook(capacity=5)
    with pytest.raises(ValueError, match=r"clients.*distinct.*\['a', 'a'\]"):
        codebook(clients=["a", "a"])
    codes = codebook()
    with pytest.raises(ValueError, match=r"'south'.*north, silo\.2"):
        codes(normal(3, 4), "south")
    with pytest.raises(ValueError, match=r"client.*north, silo\.2"):
        codes(normal(3, 4))
    with pytest.raises(ValueError, match=r"part.*\[v, 4\].*\[2, 3\]"):
        codes.extend("north", normal(2, 3))
    with pytest.raises(ValueError, match=r"'north'.*17.*capacity.*16"):
        codes.extend("north", normal(11, 4))
    with pytest.raises(ValueError, match=r"part.*NaN"):
        codes.extend("north", torch.full((1, 4), float("nan")))
    with pytest.raises(ValueError, match=r"mass.*\[2\].*\[2, 6\].*\[3\]"):
        codes.average(0, [1, 2, 3])
    with pytest.raises(ValueError, match=r"mass.*finite"):
        codes.average(0, [1, -1])
    with pytest.raises(ValueError, match=r"part 0.*\[6, 4\].*\[5, 4\]"):
        codes.set_part(0, normal(5, 4))
    with pytest.raises(ValueError, match=r"part.*distinct.*\['north', 'north'\]"):
        codes.extend(["north", "north"], normal(1, 4))
    assert codes.size("north") == 6
    assert len(codes.part_clients) == 1
    codes.extend("north", normal(1, 4))
    with pytest.raises(ValueError, match=r"client 'silo\.2'.*part 1"):
        codes.rows(1, "silo.2")
