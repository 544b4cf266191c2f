"""Every backend of vq_backward that runs here agrees with the reference.

The reference agrees with autograd on the formula.
"""

from __future__ import annotations

import pytest
import torch

from uefl_kernels import COMPILED, vq, vq_assign
from uefl_kernels._library import triton_available

from .conftest import DTYPES, cuda_built, normal

NAMESPACES = [pytest.param("uefl", id="auto"), pytest.param("uefl_triton", id="triton")]
# half a unit of 1.0
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float64: 2.0**-53,
}


@pytest.fixture(params=NAMESPACES)
def op(request, monkeypatch):
    if request.param == "uefl_triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("Triton runs natively here (test_cuda.py)")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return getattr(torch.ops, request.param).vq_backward


def reference(*arguments):
    return torch.ops.uefl_reference.vq_backward(*arguments)


def inputs(x, codebook, seed=2, pull=0.3):
    g = normal(*x.shape, seed=seed, dtype=x.dtype)
    scalar = torch.tensor(pull, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return x, codebook, vq_assign(x, codebook), g, scalar


def compare(op, x, codebook, indices, g, pull):
    """Check the straight-through gradient bit for bit, and the rotated one up to one rounding."""
    for gradient in (g, None):
        arguments = (x, codebook, indices, gradient, pull, False)
        got, want = op(*arguments), reference(*arguments)
        assert got.dtype == x.dtype
        assert got.stride() == want.stride() == torch.empty_like(x).stride()
        assert torch.equal(got.nan_to_num(nan=-7.0), want.nan_to_num(nan=-7.0))
    got, want = op(x, codebook, indices, g, pull, True), reference(x, codebook, indices, g, pull, True)
    # Both round their float64 result once to the dtype of x, where the terms of a segment have a few
    # more roundings.
    terms = (
        want.double()
        .reshape(*indices.shape, -1)
        .norm(dim=-1, keepdim=True)
        .expand(*indices.shape, codebook.shape[-1])
    )
    tolerance = (
        2 * ROUNDING[x.dtype] * want.double().abs()
        + 2.0**-48 * terms.reshape(x.shape)
        + torch.finfo(x.dtype).smallest_normal
    )
    assert ((got.double() - want.double()).abs() <= tolerance).all()


@pytest.mark.parametrize(("d", "shared"), [(1, True), (3, False), (8, True), (33, False)])
def test_equals_the_reference(op, d, shared):
    codebook = normal(17, d, seed=1) if shared else normal(3, 17, d, seed=1)
    for n in (1, 50):
        compare(op, *inputs(normal(n, 3 * d), codebook))


@pytest.mark.parametrize("codebook_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(op, dtype, codebook_dtype):
    if "triton" in str(op) and torch.bfloat16 in (dtype, codebook_dtype):
        pytest.skip("Triton's interpreter truncates to bfloat16 where a GPU rounds")
    if "triton" in str(op) and torch.float32 not in (dtype, codebook_dtype) and dtype != codebook_dtype:
        pytest.skip("the conversions of both are in other pairs; interpreted kernels take their time")
    compare(op, *inputs(normal(40, 24, dtype=dtype), normal(20, 12, seed=1, dtype=codebook_dtype)))


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_half_precision(dtype):
    """Compute (x - 0) * 1 of float64 codewords next to every kind of half-precision number.

    The numbers are halfway, subnormal, overflowing, or not finite.
    """
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).double()
    between = (patterns[1:] + patterns[:-1]) / 2
    codebook = (
        torch.cat([patterns, between, between * (1 + 2.0**-20), between * (1 - 2.0**-20)])
        .nan_to_num(0, 1e6, -1e6)
        .unsqueeze(1)
    )
    x, indices = torch.zeros(len(codebook), 1, dtype=dtype), torch.arange(len(codebook)).unsqueeze(1)
    arguments = (x, codebook.float(), indices, None, torch.tensor(-1.0), False)
    assert torch.equal(torch.ops.uefl.vq_backward(*arguments), reference(*arguments))
    assert torch.equal(reference(*arguments), codebook.float().to(dtype) + 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float64_reaches_half_precision_by_way_of_float32(op, dtype):
    """As in torch, values that float32 rounds to the middle of two numbers go to the even one."""
    if "triton" in str(op) and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16 where a GPU rounds")
    numbers = torch.arange(0x3C00, 0x3D00).to(torch.int16).view(dtype).double()
    middle = (numbers[1:] + numbers[:-1]) / 2
    codebook = torch.cat([middle * (1 + 2.0**-30), middle * (1 - 2.0**-30)]).unsqueeze(1)
    x, indices = torch.zeros(len(codebook), 1, dtype=dtype), torch.arange(len(codebook)).unsqueeze(1)
    arguments = (x, codebook, indices, None, torch.tensor(-1.0), False)
    assert torch.equal(op(*arguments), reference(*arguments))
    assert torch.equal(reference(*arguments), codebook.float().to(dtype))


LAYOUTS = {
    "channels first": lambda t: t.movedim(-1, 1).contiguous().movedim(1, -1),
    "transposed rows": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every other": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "expanded": lambda t: t[:1].expand_as(t),
    "three strides": lambda t: torch.stack([t, t], 2)[:, :, 0].transpose(0, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(op, layout):
    x, g = normal(4, 5, 6, 12), normal(4, 5, 6, 12, seed=2)
    laid = LAYOUTS[layout](x)
    assert not laid.is_contiguous()
    codebook = normal(3, 9, 4, seed=1)
    _, _, indices, _, pull = inputs(laid, codebook)
    for gradient in (normal(*laid.shape, seed=3), LAYOUTS[layout](g), torch.ones(()).expand(laid.shape)):
        compare(op, laid, codebook, indices, gradient, pull)
    compare(op, laid.contiguous(), codebook, indices, LAYOUTS[layout](g), pull)


def test_rows_that_are_not_finite_change_no_other_rows(op):
    x, codebook, _, g, pull = inputs(normal(30, 8), normal(6, 8, seed=1))
    x[3, 2], x[10, 0], x[20] = float("nan"), float("inf"), 0.0
    indices = vq_assign(x, codebook)
    for rotation in (False, True):
        got = op(x, codebook, indices, g, pull, rotation)
        assert got.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [3, 10]
        assert torch.equal(got.isnan(), reference(x, codebook, indices, g, pull, rotation).isnan())


def test_lengths_below_epsilon_count_as_epsilon(op):
    x, codebook = normal(40, 12), normal(9, 6, seed=1)
    x[::2] *= 1e-8
    x[1], codebook[0] = 0, 0
    codebook[1:4] *= 1e-8
    compare(op, *inputs(x, codebook))


def test_no_rows(op):
    for rotation in (False, True):
        assert op(*inputs(torch.empty(0, 4, 6), normal(5, 3)), rotation).shape == (0, 4, 6)


def composed(x, codebook):
    """Compute the formula of vq's docstring: the rotation and its scale are constants."""
    q = codebook[vq_assign(x, codebook).squeeze(-1)]
    u, v = (
        torch.nn.functional.normalize(x.detach(), dim=-1),
        torch.nn.functional.normalize(q.detach(), dim=-1),
    )
    w = torch.nn.functional.normalize(u + v, dim=-1)
    turned = x - 2 * (x * w).sum(-1, keepdim=True) * w + 2 * (x * u).sum(-1, keepdim=True) * v
    return turned * (q.detach().norm(dim=-1, keepdim=True) / x.detach().norm(dim=-1, keepdim=True))


def test_rotation_is_the_derivative_of_the_rotated_row():
    weight, codebook = normal(60, 7, seed=3, dtype=torch.float64), normal(9, 7, seed=1, dtype=torch.float64)
    gradients = []
    for function in (
        lambda x: vq(x, codebook, estimator="rotation").quantized,
        lambda x: composed(x, codebook),
    ):
        x = normal(60, 7, dtype=torch.float64).requires_grad_()
        value = function(x)
        (value * weight).sum().backward()
        gradients.append((value, x.grad))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_rotation_onto_the_opposite_direction_is_accurate(op):
    """For x close to -q, u + v cancels, and float32 would lose all digits."""
    codebook = normal(1, 8, seed=1)
    x, codebook, indices, g, pull = inputs(-codebook + 1e-4 * normal(20, 8), codebook)
    wide = reference(x.double(), codebook.double(), indices, g.double(), pull.double(), True)
    got = op(x, codebook, indices, g, pull, True)
    torch.testing.assert_close(got.double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.every_variant
@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_number_of_threads_does_not_change_a_bit():
    arguments = inputs(normal(30000, 24), normal(16, 8, seed=1))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(torch.ops.uefl.vq_backward(*arguments, True))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("rotation", [True, False])
def test_opcheck(rotation):
    channels_first = normal(2, 6, 4, 5).permute(0, 2, 3, 1)
    for x in (normal(4, 5, 6), channels_first):
        torch.library.opcheck(
            torch.ops.uefl.vq_backward.default, (*inputs(x, normal(7, 3, seed=1)), rotation)
        )


def test_compile_fullgraph(full_graph):
    codebook = normal(9, 4, seed=1)

    def step(x):
        out = vq(x * 2, codebook, estimator="rotation")
        return out.quantized.square().sum() + out.loss

    gradients = []
    for function in (full_graph(step), step):
        x = normal(33, 8).requires_grad_()
        function(x).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


WRONG = {
    "index": ({2: torch.tensor([[0], [5]])}, "^vq_backward: indices.*K = 5"),
    "negative index": ({2: torch.tensor([[0], [-1]])}, "^vq_backward: indices.*K = 5"),
    "indices": ({2: torch.tensor([[0, 0], [1, 1]])}, r"^vq_backward: indices.*int64.*\[..., S\]"),
    "g": ({3: torch.zeros(2, 4)}, "^vq_backward: grad_quantized.*shape.*dtype.*x"),
    "dtype of g": ({3: torch.zeros(2, 3).half()}, "^vq_backward: grad_quantized.*shape.*dtype.*x"),
    "pull": ({4: torch.zeros(2)}, "^vq_backward: pull.*float32.*scalar"),
    "length": ({1: torch.zeros(5, 4)}, r"^vq_backward: D .*\[K, d\]"),
}


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
@pytest.mark.parametrize("case", WRONG)
def test_direct_calls_are_guarded(case):
    changes, message = WRONG[case]
    arguments = [
        torch.zeros(2, 3),
        torch.zeros(5, 3),
        torch.tensor([[0], [1]]),
        torch.zeros(2, 3),
        torch.tensor(1.0),
        False,
    ]
    for position, value in changes.items():
        arguments[position] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.uefl.vq_backward(*arguments)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("namespace", ["uefl_cuda", "uefl_triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype, namespace):
    if not (triton_available() if namespace == "uefl_triton" else cuda_built("vq_backward")):
        pytest.skip(f"{namespace} is not built here")
    for x in (normal(300, 24, dtype=dtype), normal(4, 24, 5, 6, dtype=dtype).permute(0, 2, 3, 1)):
        arguments = [t.cuda() for t in inputs(x, normal(3, 20, 8, seed=1))]
        compare(getattr(torch.ops, namespace).vq_backward, *arguments)


@pytest.mark.parametrize("rotation", [False, True])
def test_triton_reads_nothing_for_an_index_out_of_range(rotation, monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton runs natively here (test_cuda.py)")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, codebook, indices, g, pull = inputs(normal(6, 3), normal(5, 3, seed=1))
    expected = reference(x, codebook, indices, g, pull, rotation)
    indices[1], indices[4] = 5, -(1 << 40)
    found = torch.ops.uefl_triton.vq_backward(x, codebook, indices, g, pull, rotation)
    assert found[[1, 4]].isnan().all()
    torch.testing.assert_close(found[[0, 2, 3, 5]], expected[[0, 2, 3, 5]])
