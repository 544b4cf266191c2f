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
    extensible = codebook()
    assert torch.equal(extensible.codebook("north"), extensible.codebook("silo.2"))
    first, second = normal(3, 4, seed=1), normal(2, 4, seed=2)
    assert extensible.extend("north", first) == 1
    assert extensible.extend("north", second) == 2
    assert extensible.rows(2, "north") == slice(9, 11)
    assert torch.equal(extensible.codebook("north"), torch.cat([extensible.part(0, "north"), first, second]))
    assert (extensible.size("north"), extensible.size("silo.2")) == (11, 6)
    x = normal(2, 5, 8)
    for got, want in zip(
        extensible(x, "north")[:4], vq(x, extensible.codebook("north").detach())[:4], strict=True
    ):
        torch.testing.assert_close(got, want)
    assert extensible(x, "silo.2").counts.shape == (6,)


@pytest.mark.parametrize("mass", [None, [0.1, 0.3]])
def test_defaults_of_the_caller_change_nothing(mass):
    found = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        extensible = codebook()
        extensible.extend("north", normal(3, 4, seed=1))
        extensible.set_part(1, normal(3, 4, seed=2))
        with torch.no_grad():
            extensible.part(0, "north").add_(1)
        with torch.device(device):
            torch.set_default_dtype(dtype)
            try:
                found.append((extensible.average(mass=mass), extensible.state_dict()["_extra_state"]))
            finally:
                torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, *found))


def test_repr_is_a_line_for_any_number_of_clients():
    extensible = codebook(clients=[f"silo {i}" for i in range(200)])
    extensible.extend("silo 3", normal(2, 4))
    assert (
        repr(torch.nn.Sequential(extensible))
        == "Sequential(\n  (0): ExtensibleCodebook(dim=4, capacity=16, clients=200, parts=2)\n)"
    )


def test_part_of_some_clients_is_averaged_only_by_them():
    extensible = codebook(clients=["a", "b", "c"])
    extensible.extend("b", normal(2, 4, seed=1))
    group = normal(3, 4, seed=2)
    assert extensible.extend(["c", "b"], group) == 2
    assert [sorted(names) for names in extensible.part_clients] == [["a", "b", "c"], ["b"], ["b", "c"]]
    assert [extensible.size(name) for name in "abc"] == [6, 11, 9]
    assert (extensible.rows(2, "b"), extensible.rows(2, "c")) == (slice(8, 11), slice(6, 9))
    assert torch.equal(extensible.part(2, "b"), group)
    with torch.no_grad():
        extensible.part(2, "b").fill_(1)
        extensible.part(2, "c").fill_(4)
    before = extensible.codebook("b")[:8].clone()
    assert extensible.average(2, [2, 1]).unique().item() == 2
    assert (
        extensible.part(2, "b").unique().item()
        == extensible.part(2, "c").unique().item()
        == extensible.part(2).unique().item()
        == 2
    )
    assert torch.equal(extensible.codebook("b")[:8], before)


def test_nothing_is_copied():
    extensible = codebook()
    address = extensible.weights[0].data_ptr()
    extensible.extend("north", normal(10, 4))
    assert (
        extensible.codebook("north").data_ptr()
        == extensible.part(0, "north").data_ptr()
        == extensible.weights[0].data_ptr()
        == address
    )


def test_optimizer_keeps_its_state_over_an_extension():
    extensible, x = codebook(), normal(200, 4)
    optimizer = torch.optim.Adam(extensible.parameters(), lr=0.05)

    def step():
        optimizer.zero_grad()
        extensible(x, "north").loss.backward()
        optimizer.step()
        return extensible(x, "north").loss.item()

    before = [step() for _ in range(20)][-1]
    moments = optimizer.state[extensible.weights[0]]["exp_avg"].clone()
    assert not extensible.weights[0][6:].any()
    assert extensible.weights[1].grad is None
    extensible.extend("north", x[:8])
    assert torch.equal(optimizer.state[extensible.weights[0]]["exp_avg"], moments)
    assert [step() for _ in range(20)][-1] < before
    assert extensible.weights[0][6:14].any(-1).all()
    assert not extensible.weights[0][14:].any()


def test_shared_part_is_averaged():
    extensible = codebook()
    with torch.no_grad():
        extensible.part(0, "north").fill_(1)
        extensible.part(0, "silo.2").fill_(4)
    extensible.extend("north", normal(2, 4))
    own = extensible.codebook("north")[6:].detach().clone()
    usage = torch.tensor([[0, 1, 2, 3, 1, 1], [0, 0, 1, 0, 1, 1]])
    assert extensible.average(mass=usage)[:, 0].tolist() == [2.5, 1, 2, 1, 2.5, 2.5]
    assert torch.equal(extensible.part(0, "north"), extensible.part(0, "silo.2"))
    assert torch.equal(extensible.codebook("north")[6:], own)
    extensible.set_part(0, torch.zeros(6, 4))
    with torch.no_grad():
        extensible.part(0, "north").fill_(1)
    assert extensible.average(0, [3, 1])[0, 0].item() == 0.75
    assert extensible.average()[0, 0].item() == 0.75


def test_state_dict_round_trip():
    extensible, other = codebook(), codebook()
    extensible.extend("silo.2", normal(5, 4))
    other.load_state_dict(extensible.state_dict())
    for same in (other, copy.deepcopy(extensible)):
        assert torch.equal(same.codebook("silo.2"), extensible.codebook("silo.2"))
        assert same.part_clients == extensible.part_clients
        assert same.extend("silo.2", normal(1, 4)) == 2
        assert same.rows(2, "silo.2") == slice(11, 12)
    # safetensors saves only tensors
    assert all(isinstance(value, torch.Tensor) for value in extensible.state_dict().values())


def test_half_precision_and_compile(full_graph):
    extensible = codebook(clients=["one"]).to(torch.bfloat16)
    assert extensible.codebook("one").dtype == torch.float32
    x = normal(30, 4, dtype=torch.bfloat16).requires_grad_()
    out = full_graph(extensible)(x)
    (out.quantized.float().sum() + out.loss).backward()
    assert out.quantized.dtype == x.grad.dtype == torch.bfloat16
    assert torch.equal(out.indices, extensible(x).indices)


def test_refuses():
    with pytest.raises(ValueError, match=r"shared.*capacity=5.*\[6, 4\]"):
        codebook(capacity=5)
    with pytest.raises(ValueError, match=r"clients.*distinct.*\['a', 'a'\]"):
        codebook(clients=["a", "a"])
    with pytest.raises(ValueError, match=r"clients.*'ab'"):
        codebook(clients="ab")
    with pytest.raises(ValueError, match=r"capacity.*'9'"):
        codebook(capacity="9")
    extensible = codebook()
    for call in (
        lambda rows: ExtensibleCodebook(rows, capacity=9),
        lambda rows: extensible.extend("north", rows),
        lambda rows: extensible.set_part(0, rows),
    ):
        with pytest.raises(TypeError, match=r"^ExtensibleCodebook: .*list.*torch\.tensor"):
            call([[1.0, 2.0, 3.0, 4.0]])
    with pytest.raises(ValueError, match=r"'south'.*north, silo\.2"):
        extensible(normal(3, 4), "south")
    with pytest.raises(ValueError, match=r"client.*north, silo\.2"):
        extensible(normal(3, 4))
    with pytest.raises(ValueError, match=r"part.*\[v, 4\].*\[2, 3\]"):
        extensible.extend("north", normal(2, 3))
    with pytest.raises(ValueError, match=r"'north'.*17.*capacity.*16"):
        extensible.extend("north", normal(11, 4))
    with pytest.raises(ValueError, match=r"part.*NaN"):
        extensible.extend("north", torch.full((1, 4), float("nan")))
    with pytest.raises(ValueError, match=r"mass.*\[2\].*\[2, 6\].*\[3\]"):
        extensible.average(0, [1, 2, 3])
    with pytest.raises(ValueError, match=r"mass.*finite"):
        extensible.average(0, [1, -1])
    with pytest.raises(ValueError, match=r"part 0.*\[6, 4\].*\[5, 4\]"):
        extensible.set_part(0, normal(5, 4))
    with pytest.raises(ValueError, match=r"part.*distinct.*\['north', 'north'\]"):
        extensible.extend(["north", "north"], normal(1, 4))
    assert extensible.size("north") == 6
    assert len(extensible.part_clients) == 1
    extensible.extend("north", normal(1, 4))
    with pytest.raises(ValueError, match=r"client 'silo\.2'.*part 1"):
        extensible.rows(1, "silo.2")
