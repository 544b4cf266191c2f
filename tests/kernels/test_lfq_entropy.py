"""lfq_entropy against its float64 definition, and LFQ with many codes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uefl_kernels import backend
from uefl_kernels.nn import LFQ
from uefl_kernels.ops.lfq_entropy import composed, lfq_entropy

from .conftest import DTYPES

SHAPES = ((5, 1, 1), (37, 2, 3), (100, 1, 8), (64, 3, 9), (7, 1, 13), (0, 1, 4))
BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def results_and_gradient(rows):
    leaf = rows.detach().requires_grad_()
    entropy, mean = lfq_entropy(leaf)
    (entropy + (mean * torch.arange(mean.numel()).view_as(mean).cos()).sum()).backward()
    return entropy.detach(), mean.detach(), leaf.grad


@pytest.mark.parametrize("scale", [0.1, 3.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(monkeypatch, dtype, scale):
    monkeypatch.setitem(composed._BLOCK_ELEMENTS, "cpu", 2000)  # several blocks
    for shape in SHAPES:
        rows = (scale * torch.randn(shape)).to(dtype)
        with backend("reference"):
            expected = results_and_gradient(rows)
        for found, wanted in zip(results_and_gradient(rows), expected, strict=True):
            assert found.dtype == dtype
            size = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
            torch.testing.assert_close(found, wanted, rtol=0, atol=BOUND[dtype] * size)


def test_equals_the_formula():
    rows = torch.randn(6, 2, 3, dtype=torch.float64)
    codes = torch.tensor([[1.0 if code >> bit & 1 else -1.0 for bit in (2, 1, 0)] for code in range(8)])
    probs = (rows @ codes.double().t()).softmax(-1)
    entropy, mean = lfq_entropy(rows)
    assert float(entropy) == pytest.approx(float(-(probs * probs.log()).sum(-1).mean()), rel=1e-12)
    torch.testing.assert_close(mean, probs.mean(0))


def test_first_and_second_gradients():
    rows = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lfq_entropy, rows)
    assert torch.autograd.gradgradcheck(lfq_entropy, rows)


def test_opcheck():
    torch.library.opcheck(torch.ops.uefl.lfq_entropy.default, (torch.randn(5, 2, 3, requires_grad=True),))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_makes_nan(value):
    rows = torch.randn(4, 1, 5)
    rows[2, 0, 1] = value
    for results in (lfq_entropy(rows), composed.lfq_entropy(composed.Arguments(rows))):
        assert all(bool(result.isnan().any()) for result in results)


def test_vmap_and_compile_agree_with_calls():
    rows = torch.randn(3, 4, 1, 5)
    expected = [lfq_entropy(part) for part in rows]
    for found, wanted in zip(torch.func.vmap(lfq_entropy)(rows), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(wanted))
    compiled = torch.compile(lfq_entropy, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(rows[0]), expected[0], strict=True):
        torch.testing.assert_close(found, wanted)


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_memory_does_not_grow_with_rows_times_codes():
    bits, rows = 12, torch.randn(1000, 12, requires_grad=True)
    layer = LFQ(codebook_size=2**bits, entropy_loss_weight=1.0)
    with LargestTensor() as largest:
        layer(rows.unsqueeze(0)).entropy_aux_loss.backward()
    assert 2**bits < largest.elements <= composed._BLOCK_ELEMENTS["cpu"] < rows.shape[0] * 2**bits
