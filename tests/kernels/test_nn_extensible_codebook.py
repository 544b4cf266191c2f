"""ExtensibleCodebook: what a client sees, what an optimizer keeps, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch

from uefl_kernels import vq
from uefl_kernels.nn import ExtensibleCodebook

from .conftest import normal


def book(**options):
    torch.manual_seed(0)
    return ExtensibleCodebook(4, 6, **({"capacity": 16, "clients": ["north", "silo.2"]} | options))


def test_a_client_sees_the_shared_block_and_its_own():
    codes = book()
    assert torch.equal(codes.codebook("north"), codes.codebook("silo.2"))
    first, second = normal(3, 4, seed=1), normal(2, 4, seed=2)
    assert codes.extend("north", first) == range(6, 9)
    assert codes.extend("north", second) == range(9, 11)
    assert torch.equal(codes.codebook("north"), torch.cat([codes.shared("north"), first, second]))
    assert (codes.size("north"), codes.size("silo.2")) == (11, 6)
    x = normal(2, 5, 8)
    for got, want in zip(codes(x, "north")[:4], vq(x, codes.codebook("north").detach())[:4], strict=True):
        torch.testing.assert_close(got, want)
    assert codes(x, "silo.2").counts.shape == (6,)


def test_nothing_is_copied():
    codes = book()
    address = codes.weights[0].data_ptr()
    codes.extend("north", normal(10, 4))
    assert codes.codebook("north").data_ptr() == codes.shared("north").data_ptr() == codes.weights[0].data_ptr() == address


def test_an_optimizer_goes_on_over_an_extension():
    codes, x = book(), normal(200, 4)
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


def test_shared_block_is_averaged():
    codes = book()
    with torch.no_grad():
        codes.shared("north").fill_(1)
        codes.shared("silo.2").fill_(4)
    codes.extend("north", normal(2, 4))
    own = codes.codebook("north")[6:].detach().clone()
    usage = torch.tensor([[0, 1, 2, 3, 1, 1], [0, 0, 1, 0, 1, 1]])
    assert codes.average_shared(usage)[:, 0].tolist() == [2.5, 1, 2, 1, 2.5, 2.5]
    assert torch.equal(codes.shared("north"), codes.shared("silo.2"))
    assert torch.equal(codes.codebook("north")[6:], own)
    codes.set_shared(torch.zeros(6, 4))
    with torch.no_grad():
        codes.shared("north").fill_(1)
    assert codes.average_shared([3, 1])[0, 0].item() == 0.75
    assert codes.average_shared()[0, 0].item() == 0.75


def test_state_goes_round():
    codes, other = book(), book()
    codes.extend("silo.2", normal(5, 4))
    other.load_state_dict(codes.state_dict())
    for same in (other, copy.deepcopy(codes)):
        assert torch.equal(same.codebook("silo.2"), codes.codebook("silo.2"))
        assert same.extend("silo.2", normal(1, 4)) == range(11, 12)


def test_half_precision_and_compile():
    codes = book(clients=["one"]).to(torch.bfloat16)
    assert codes.codebook("one").dtype == torch.float32
    x = normal(30, 4, dtype=torch.bfloat16).requires_grad_()
    torch._dynamo.reset()
    out = torch.compile(codes, fullgraph=True, backend="aot_eager")(x)
    (out.quantized.float().sum() + out.loss).backward()
    assert out.quantized.dtype == x.grad.dtype == torch.bfloat16
    assert torch.equal(out.indices, codes(x).indices)


def test_refuses():
    with pytest.raises(ValueError, match="dim=4, shared=6 and capacity=5 must be"):
        book(capacity=5)
    with pytest.raises(ValueError, match=r"clients must be distinct names, at least one, got \['a', 'a'\]"):
        book(clients=["a", "a"])
    codes = book()
    with pytest.raises(ValueError, match=r"there is no client 'south', only north, silo\.2"):
        codes(normal(3, 4), "south")
    with pytest.raises(ValueError, match=r"name the client, one of north, silo\.2"):
        codes(normal(3, 4))
    with pytest.raises(ValueError, match=r"block must have shape \[n, 4\], got \[2, 3\]"):
        codes.extend("north", normal(2, 3))
    with pytest.raises(ValueError, match=r"11 more codewords for 'north' make 17, and capacity is 16"):
        codes.extend("north", normal(11, 4))
    with pytest.raises(ValueError, match="block holds NaN or infinity"):
        codes.extend("north", torch.full((1, 4), float("nan")))
    with pytest.raises(ValueError, match=r"mass must have shape \[2\] or \[2, 6\], got \[3\]"):
        codes.average_shared([1, 2, 3])
    with pytest.raises(ValueError, match="mass must be finite and not negative"):
        codes.average_shared([1, -1])
    with pytest.raises(ValueError, match=r"the shared block has shape \[6, 4\], got \[5, 4\]"):
        codes.set_shared(normal(5, 4))
    assert codes.size("north") == 6
