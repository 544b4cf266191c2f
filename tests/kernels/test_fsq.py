"""fsq against its float64 definition, on every backend that runs here."""

from __future__ import annotations

import math

import pytest
import torch

from uefl_kernels import backend
from uefl_kernels.nn import FSQ
from uefl_kernels.ops.fsq import composed, fsq

from . import ahead
from .conftest import normal

LEVELS = ([8, 5, 5, 5], [2, 3], [7], [4] * 9, [1000], [2001, 3], [33, 40, 2], [32, 33])
FORMS = [
    (levels, symmetric, clamp)
    for levels in LEVELS
    for symmetric in (False, True)
    for clamp in (False, True)
    if symmetric or 2 not in levels
]
INFINITY = math.inf


def cases(levels, symmetric, clamp, dtype):
    """Return rows: random ones, each threshold with the floats next to it, and special values."""
    form = composed.Form(tuple(levels), symmetric, clamp)
    exact = [torch.tensor(row, dtype=torch.float64) for row in form.thresholds()]
    near = torch.stack([row[torch.arange(len(max(exact, key=len))) % len(row)] for row in exact], -1).to(
        dtype
    )
    up, down = (near.nextafter(torch.tensor(end, dtype=dtype)) for end in (INFINITY, -INFINITY))
    ends = [1.0, -1.0]  # of the clamped range, where the gradient does not vanish
    special = torch.tensor([0.0, -0.0, *ends, 1e30, -1e30, INFINITY, -INFINITY, math.nan, 1e-40], dtype=dtype)
    random = normal(1001, len(levels), scale=1.5, dtype=dtype)
    return torch.cat([random, near, up, down, special.unsqueeze(-1).expand(-1, len(levels))])


def results(z, *form):
    leaf = z.detach().requires_grad_()
    quantized, indices = fsq(leaf, *form, True)
    (gradient,) = torch.autograd.grad(quantized, leaf, normal(*z.shape, seed=1, dtype=z.dtype))
    return quantized.detach(), indices, gradient


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("levels", "symmetric", "clamp"), FORMS, ids=str)
def test_equals_the_reference(levels, symmetric, clamp, dtype):
    z = cases(levels, symmetric, clamp, dtype)
    with backend("reference"):
        quantized, indices, gradient = results(z, levels, symmetric, clamp)
    found = results(z, levels, symmetric, clamp)
    assert torch.equal(found[1], indices)
    near(found[0], quantized)
    near(found[2], gradient)
    given = composed.Arguments(z, levels, symmetric, clamp, True)
    assert torch.equal(composed.fsq(given)[1], indices)
    torch.testing.assert_close(composed.fsq(given)[0], found[0], rtol=0, atol=0, equal_nan=True)
    near(composed.formula(z, given.form, True)[0][:1001], quantized[:1001])


@pytest.mark.parametrize(
    ("levels", "symmetric", "clamp"),
    [pytest.param(*form, marks=[pytest.mark.slow] if max(form[0]) > 900 else []) for form in FORMS],
    ids=str,
)
def test_triton_equals_the_reference(monkeypatch, levels, symmetric, clamp):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels run natively here")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    z = cases(levels, symmetric, clamp, torch.float32)[-900:]
    quantized, indices, gradient = results(z, levels, symmetric, clamp)
    with backend("triton"):
        found = results(z, levels, symmetric, clamp)
    assert torch.equal(found[1], indices)
    torch.testing.assert_close(found[0], quantized, rtol=0, atol=0, equal_nan=True)
    near(found[2], gradient)


def test_indices_count_all_codewords():
    levels = [3, 4, 5]
    quantized, indices = fsq(normal(5000, 3, scale=2.0), levels, False, False, True)
    assert set(indices.tolist()) == set(range(60))
    level = indices.long().unsqueeze(-1) // torch.tensor([1, 3, 12]) % torch.tensor(levels)
    assert torch.equal(quantized, (level - torch.tensor([1, 2, 2])) / torch.tensor([1.0, 2.0, 2.0]))
    wide = fsq(torch.zeros(3, 40), [3] * 40, False, False, True)[1]
    assert wide.dtype == torch.int64
    assert int(wide[0]) == sum(3**place for place in range(40))
    assert fsq(torch.ones(1, 2), [2**16, 2**15], False, True, True)[1].tolist() == [2**31 - 1]
    assert fsq(torch.ones(1, 2), [2**16, 2**15], False, True, True)[1].dtype == torch.int32


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 20_000])
def test_any_number_of_rows(rows, clamp):
    z = normal(rows, 3)
    found, one = results(z, [8, 5, 5], False, clamp), results(z.repeat(1, 1, 1), [8, 5, 5], False, clamp)
    for batch, alone in zip(found, one, strict=True):
        assert torch.equal(batch, alone.squeeze(0))
    parts = [results(row.unsqueeze(0), [8, 5, 5], False, clamp)[:2] for row in z[:40]]
    for i, name in enumerate(("quantized", "indices")):
        assert all(torch.equal(part[i][0], found[i][row]) for row, part in enumerate(parts)), name


def test_strides_make_no_difference():
    z = normal(5, 3, 7)
    expected = results(z.movedim(1, -1).contiguous(), [8, 5, 5], False, False)
    leaf = z.requires_grad_()
    quantized, indices = fsq(leaf.movedim(1, -1), [8, 5, 5], False, False, True)
    (gradient,) = torch.autograd.grad(quantized, leaf, normal(5, 7, 3, seed=1))
    for found, wanted in zip((quantized, indices, gradient.movedim(1, -1)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_first_and_second_gradients():
    """The gradient is that of the bound, which finite differences of the levels do not show."""
    z = normal(5, 3, dtype=torch.float64).requires_grad_()
    form = composed.Form((8, 5, 5), False, False)

    def bounded(z):
        return (z + z.new_tensor(form.shift())).tanh() * z.new_tensor(form.slope())

    (expected,) = torch.autograd.grad(bounded(z).sum(), z, create_graph=True)
    (found,) = torch.autograd.grad(fsq(z, [8, 5, 5], False, False, True)[0].sum(), z, create_graph=True)
    torch.testing.assert_close(found, expected)
    second = [torch.autograd.grad(first.square().sum(), z)[0] for first in (found, expected)]
    torch.testing.assert_close(*second)


def test_transforms_agree_with_calls(full_graph):
    layer = FSQ([8, 5, 5])
    z, tangent = normal(4, 6, 3), normal(4, 6, 3, seed=1)
    quantized, indices = layer(z)
    for found in (torch.func.vmap(layer)(z), full_graph(layer)(z)):
        assert torch.equal(found[0], quantized)
        assert torch.equal(found[1], indices)
    expected = results(z, [8, 5, 5], False, False)[2]
    weighted = lambda z: (layer(z)[0] * normal(4, 6, 3, seed=1)).sum()  # noqa: E731
    near(torch.func.grad(weighted)(z), expected)
    one = lambda z, weight: (layer(z)[0] * weight).sum()  # noqa: E731
    near(torch.func.vmap(torch.func.grad(one))(z, normal(4, 6, 3, seed=1)), expected)
    _, moved = torch.func.jvp(lambda z: layer(z)[0], (z,), (tangent,))
    ones = results(z, [8, 5, 5], False, False)[2] / normal(4, 6, 3, seed=1)
    torch.testing.assert_close(moved, tangent * ones, rtol=1e-4, atol=1e-5)


def test_opcheck():
    z = normal(5, 3).requires_grad_()
    torch.library.opcheck(torch.ops.uefl.fsq.default, (z, [8, 5, 5], False, False, True))
    torch.library.opcheck(
        torch.ops.uefl.fsq_backward.default, (z.detach(), z.detach(), [8, 5, 5], True, True)
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(2, 3).half(), [4, 4, 4]),
        (torch.zeros(2, 3), [4, 4]),
        (torch.zeros(2, 3), []),
        (torch.zeros(()), [4]),
        (torch.zeros(2, 1), [1]),
    ],
    ids=["dtype", "levels", "no levels", "no dimension", "one level"],
)
def test_a_wrong_direct_call_is_refused(arguments):
    with pytest.raises(RuntimeError, match=r"^fsq: "):
        torch.ops.uefl.fsq(*arguments, False, False, True)


COMPILE = """
import json
from tests.kernels.ahead import build
from uefl_kernels.ops.fsq.triton import _fsq, _fsq_backward

report, constants = [], {"INDEXED": True, "CLAMP": False, "ROWS": 256, "ELEMENTS": 1024}
for element in ("*fp32", "*fp64"):
    names = ("z", "thresholds", "values", "quantized", "grad", "shift", "slope", "grad_z")
    types = dict.fromkeys(names, element) | {"levels": "*i64", "factors": "*i64", "indices": "*i32"}
    types |= {"width": "i32", "d": "i32"}
    for kernel in (_fsq, _fsq_backward):
        for architecture in (80, 90, 100):
            built = build(kernel, architecture, constants, types)
            report.append(len(built.asm["cubin"]))
print(json.dumps(report))
"""


@pytest.mark.slow
def test_triton_compiles_for_every_generation(tmp_path):
    pytest.importorskip("triton")
    assert min(ahead.report(COMPILE, tmp_path)) > 0
