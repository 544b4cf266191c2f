"""``linear`` gives the same bits for any number of threads, and the accuracy of torch's product.

tests/cpp/test_linear.cpp tests the values.
"""

from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from uefl_kernels import COMPILED, backend, mc_dropout_mlp
from uefl_kernels.ops.linear import linear

from .conftest import normal

pytestmark = pytest.mark.every_variant
compiled = pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
N, D, M = 700, 300, 100  # enough rows for the tiles


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(N, D, dtype=dtype), normal(M, D, seed=1, dtype=dtype), normal(M, seed=2, dtype=dtype)


def test_against_the_definition():
    x, weight, bias = operands()
    expected = F.linear(x.double(), weight.double(), bias.double())
    size = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert bool(((linear(x, weight, bias) - expected).abs() <= size * 1e-6).all())
    assert bool(((linear(x, weight, None) - (expected - bias)).abs() <= size * 1e-6).all())
    torch.testing.assert_close(
        torch.ops.uefl_reference.linear(x, weight, bias), expected.float(), rtol=0, atol=0
    )


@pytest.mark.parametrize("shape", [(0, 5, 3), (3, 5, 0), (3, 0, 4), (1, 1, 1), (600, 1, 1)], ids=str)
def test_odd_sizes(shape):
    rows, inputs, outputs = shape
    x, weight, bias = normal(rows, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


def test_strided_operands():
    x, weight, bias = operands()
    turned = x.T.contiguous().T, weight.T.contiguous().T, bias.repeat_interleave(2)[::2]
    torch.testing.assert_close(linear(*turned), linear(x, weight, bias))
    wide = normal(2 * N, 2 * D)[::2, ::2]
    torch.testing.assert_close(linear(wide, weight, bias), linear(wide.contiguous(), weight, bias))


@compiled
@pytest.mark.parametrize("largest", [3.0, 2.0**41])  # AMX computes only values below 2^40
@pytest.mark.parametrize("rows", [1, 40, N])
def test_number_of_threads_does_not_matter(rows, largest):
    x, weight, bias = operands()
    x, x[0, 0] = x[:rows], largest
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(linear(x, weight, bias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_gradients_equal_torch():
    ours = [operand.requires_grad_() for operand in operands()]
    theirs = [operand.detach().clone().requires_grad_() for operand in ours]
    grad = normal(N, M, seed=3)
    for operand, expected in zip(
        torch.autograd.grad(linear(*ours), ours, grad),
        torch.autograd.grad(F.linear(*theirs), theirs, grad),
        strict=True,
    ):
        torch.testing.assert_close(operand, expected)
    assert torch.autograd.grad(linear(ours[0], *operands()[1:]).sum(), ours[0])[0].shape == (N, D)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_use_torch(dtype):
    assert torch.equal(linear(*operands(dtype)), F.linear(*operands(dtype)))


def test_autocast_and_forced_backends_use_torch():
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(*operands()).dtype == torch.bfloat16
        if COMPILED:  # the op itself computes in float32
            assert {
                torch.ops.uefl.linear(operands()[0][:rows], *operands()[1:]).dtype for rows in (3, N)
            } == {torch.float32}
    with backend("reference"):
        assert torch.equal(linear(*operands()), F.linear(*operands()))


@compiled
def test_number_of_rows_changes_bits_only_with_tiles():
    x, weight, bias = operands()
    every_shape = os.environ.get("UEFL_CPU_EVERY_SHAPE")  # if it is set, tiles also compute 40 rows
    tiles = import_module("uefl_kernels._host").variant() == "amx" and not every_shape
    assert torch.equal(linear(x[:40], weight, bias), linear(x, weight, bias)[:40]) != tiles


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e-45])
@pytest.mark.parametrize("position", [0, 1])
def test_extremes_equal_torch(position, value):
    given = list(operands())
    if value < 1:
        given[position][7] = 0
    given[position][7, 3] = value
    torch.testing.assert_close(linear(*given), F.linear(*given), rtol=1e-5, atol=3e-5, equal_nan=True)


@compiled
def test_errors_of_a_direct_call():
    x, weight, bias = operands()
    message = r"linear: .*x \[700, 300\] weight \[100, 299\] bias \[100\]"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.uefl.linear(x, weight[:, 1:], bias)
    with pytest.raises(RuntimeError, match=r"linear: bias .*float32.*CPU"):
        torch.ops.uefl.linear(x, weight, bias.double())
    with pytest.raises(RuntimeError):
        torch.ops.uefl.linear(x.to("meta"), weight[:, 1:].to("meta"), bias.to("meta"))


def test_opcheck():
    torch.library.opcheck(
        torch.ops.uefl.linear.default, tuple(operand.requires_grad_() for operand in operands())
    )


def test_head_with_a_layer_before_its_first_dropout():
    """Compare the hidden layer from ``linear`` with the one from torch.

    The masks are equal, and the statistics are equal up to rounding.
    """
    x, weights = normal(N, D), [normal(M, D, seed=1, scale=D**-0.5), normal(5, M, seed=2, scale=0.1)]
    found = mc_dropout_mlp(x, weights, p=0.3, seed=1)
    hidden = F.gelu(F.linear(x, weights[0]))
    torch.testing.assert_close(
        found.mean_probs, mc_dropout_mlp(hidden, weights[1:], p=0.3, input_dropout=True, seed=1).mean_probs
    )


def test_head_under_compile(full_graph):
    x, weights = normal(N, D), [normal(M, D, seed=1, scale=D**-0.5), normal(5, M, seed=2, scale=0.1)]
    run = full_graph(lambda x: mc_dropout_mlp(x, weights, p=0.3, seed=1).entropy)
    torch.testing.assert_close(run(x), mc_dropout_mlp(x, weights, p=0.3, seed=1).entropy)
