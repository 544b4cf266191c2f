"""rvq and its gradients equal repeated vq bit for bit, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from uefl_kernels import COMPILED, backend, decompositions, rvq, rvq_with_sums, vq_with_sums
from uefl_kernels.ops.rvq.composed import residuals

from .conftest import DTYPES, normal

BACKENDS = ("auto", "reference")


def in_turn(x, codebooks, **options):
    """Quantize by one vq after the other."""
    residual, total, found = x, torch.zeros_like(x), []
    for codebook in codebooks:
        out, sums = vq_with_sums(residual, codebook, **options)
        total, residual = total + out.quantized, residual - out.quantized.detach()
        found.append((out.indices, out.loss, out.counts, sums))
    indices, losses, counts, sums = zip(*found, strict=True)
    return total, torch.stack(indices, -1), torch.stack(losses), counts, sums


def compare(x, codebooks, **options):
    out, sums = rvq_with_sums(x, codebooks, **options)
    total, indices, losses, counts, expected = in_turn(x, codebooks, **options)
    assert torch.equal(out.indices, indices.view_as(out.indices))
    got = (out.quantized, out.losses, *out.counts, *sums)
    for piece, want in zip(got, (total, losses, *counts, *expected), strict=True):
        assert piece.dtype == want.dtype
        assert piece.shape == want.shape
        assert torch.equal(piece.nan_to_num(nan=-1), want.nan_to_num(nan=-1))
    # without sums, this call may use the search for few rows
    assert torch.equal(rvq(x, codebooks, **options).indices, out.indices)
    return out


@pytest.mark.every_variant
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("n", [1, 3, 64, 700])
@pytest.mark.parametrize(("num_codebooks", "k", "d"), [(None, 33, 7), (None, 100, 33), (2, 16, 4), (3, 5, 1)])
def test_bits_of_one_stage_after_the_other(num_codebooks, k, d, n, metric):
    codebooks = normal(4, k, d, seed=1) if num_codebooks is None else normal(4, num_codebooks, k, d, seed=1)
    for segments in (1, 3) if num_codebooks is None else (num_codebooks,):
        out = compare(normal(n, segments * d), codebooks, metric=metric)
        assert out.indices.shape == ((n, 4) if num_codebooks is None and segments == 1 else (n, segments, 4))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("codebook_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, codebook_dtype, name):
    with backend(name):
        compare(normal(50, 8, dtype=dtype), normal(3, 20, 8, seed=1, dtype=codebook_dtype))


@pytest.mark.parametrize("name", BACKENDS)
def test_codebooks_of_different_sizes(name):
    with backend(name):
        out = compare(normal(400, 6), [normal(k, 6, seed=k) for k in (9, 200, 1)])
    assert [len(counted) for counted in out.counts] == [9, 200, 1]


def test_results_equal_the_reference():
    x, codebooks = normal(3, 40, 8), normal(3, 20, 4, seed=1)
    x[0, 0, 0], x[1, 3, 7] = torch.nan, torch.inf
    out = rvq(x, codebooks)
    with backend("reference"):
        want = rvq(x, codebooks)
    assert torch.equal(out.indices, want.indices)
    assert torch.equal(out.quantized.nan_to_num(), want.quantized.nan_to_num())
    assert all(map(torch.equal, out.counts, want.counts))
    assert out.losses.isnan().all()


def test_views_are_read_in_place():
    x = normal(2, 6, 5, 7)
    for view in (x.permute(0, 2, 3, 1), x.transpose(1, 2)[..., :6], x.permute(3, 2, 0, 1)[..., ::2, :]):
        compare(view, normal(3, 11, view.shape[-1] // 2, seed=1))


@pytest.mark.parametrize("name", BACKENDS)
def test_no_rows(name):
    with backend(name):
        out, sums = rvq_with_sums(normal(0, 6), normal(2, 4, 6, seed=1))
    assert out.indices.shape == (0, 2)
    assert out.losses.tolist() == [0, 0]
    assert not any(summed.any() for summed in sums)


def test_residuals_are_the_inputs_of_the_stages():
    x, codebooks = normal(40, 8, dtype=torch.bfloat16), normal(3, 12, 8, seed=1)
    out, residual = rvq(x, codebooks), x
    for stage, found in enumerate(residuals(x, codebooks, out.indices.unsqueeze(-2))):
        assert torch.equal(found, residual)
        residual = residual - codebooks[stage][out.indices[:, stage]].bfloat16()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("estimator", ["straight_through", "rotation"])
@pytest.mark.parametrize("weights", [(1.0, 0.25), (0.0, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("shape", [(3, 9, 8), (2, 2, 9, 4)])
def test_gradients_have_the_bits_of_the_composition(shape, weights, estimator, name):
    options = {"estimator": estimator, "codebook_weight": weights[0], "commitment_weight": weights[1]}
    grads, weight = normal(30, 8, seed=2), normal(shape[0], seed=3)
    found = []
    for call in (rvq, in_turn):
        x, codebooks = normal(30, 8).requires_grad_(), normal(*shape, seed=1).requires_grad_()
        with backend(name):
            quantized, _, losses, *_ = call(x, codebooks, **options)
            ((quantized * grads).sum() + (losses * weight).sum()).backward()
        found.append((x.grad, codebooks.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_gradient_of_one_result():
    x, codebooks = normal(30, 8).requires_grad_(), normal(3, 9, 8, seed=1).requires_grad_()
    out = rvq(x, codebooks)
    (passed,) = torch.autograd.grad(out.quantized.sum(), x, retain_graph=True)
    assert torch.equal(passed, torch.full_like(x, 3))
    gradient, moved = torch.autograd.grad(out.losses[1], (x, codebooks))
    assert gradient.any()
    assert not moved[0].any()
    assert moved[1].any()


def test_gradient_of_the_codebooks_without_sums_raises():
    x, codebooks = normal(4, 6), [normal(5, 6, seed=1).requires_grad_()]
    losses = torch.ops.uefl.rvq(x, codebooks, "l2", True, False, 1.0, 0.25, False)[2]
    with pytest.raises(RuntimeError, match="rvq: with_sums=False"):
        losses.sum().backward()


@pytest.mark.parametrize("with_sums", [True, False])
def test_opcheck(with_sums):
    codebooks = [normal(7, 3, seed=1).requires_grad_(), normal(4, 3, seed=2).requires_grad_()]
    arguments = (normal(4, 5, 6).requires_grad_(), codebooks, "l2", True, with_sums, 1.0, 0.25, False)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.uefl.rvq.default, arguments, test_utils=utilities if with_sums else utilities[:3]
    )


def test_compile_fullgraph(full_graph):
    codebooks = normal(3, 9, 4, seed=1).requires_grad_()

    def step(x):
        out = rvq(x * 2, codebooks)
        return out.quantized.sum() + out.losses.sum(), out.counts

    x = normal(33, 8)
    loss, counts = full_graph(step)(x)
    loss.backward()
    compiled_grad, codebooks.grad = codebooks.grad, None
    expected, expected_counts = step(x)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert all(map(torch.equal, counts, expected_counts))
    assert torch.equal(compiled_grad, codebooks.grad)


@pytest.mark.every_variant
@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
@pytest.mark.parametrize("n", [40, 20000])
def test_number_of_threads_does_not_change_a_bit(n):
    arguments = (normal(n, 16), [normal(k, 8, seed=k) for k in (16, 500)], "l2", True, True, 1.0, 0.25, False)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(torch.ops.uefl.rvq(*arguments))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_decomposition_is_the_op():
    arguments = (
        normal(3, 40, 8),
        [normal(16, 4, seed=1), normal(9, 4, seed=2)],
        "l2",
        True,
        True,
        1.0,
        0.5,
        False,
    )
    want = torch.ops.uefl.rvq(*arguments)
    got = decompositions()[torch.ops.uefl.rvq.default](*arguments)
    assert [piece.dtype for piece in got] == [piece.dtype for piece in want]
    for place in (0, 1, 3):
        assert torch.equal(got[place], want[place])
    for place in (2, 4):
        torch.testing.assert_close(got[place], want[place])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_function_transforms():
    x, codebooks = normal(3, 6, 4), normal(2, 3, 2, seed=1)
    with pytest.raises(RuntimeError, match=r"torch\.func\.grad"):
        torch.func.grad(lambda a: rvq(a, codebooks).losses.sum())(x)
    losses = torch.func.vmap(lambda a, c: rvq(a, [c, codebooks[1]]).losses, in_dims=(0, None))(
        x, codebooks[0]
    )
    assert torch.equal(losses, torch.stack([rvq(a, codebooks).losses for a in x]))
    stacked = torch.func.vmap(lambda c: rvq(x, [c, c]).quantized)(codebooks)
    assert torch.equal(stacked, torch.stack([rvq(x, [c, c]).quantized for c in codebooks]))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_codebook_that_is_not_finite_is_refused(name):
    codebooks = normal(2, 5, 6, seed=1)
    codebooks[1, 3, 2] = torch.nan
    for n in (3, 300):
        with backend(name), pytest.raises(RuntimeError, match=r"codebook.*NaN"):
            rvq(normal(n, 6), codebooks)


@pytest.mark.parametrize(
    ("codebooks", "message"),
    [
        ([], "^rvq: codebooks .*empty"),
        (normal(4, 6), r"^rvq: codebooks .*\[Q, S, K, d\].*\[4, 6\]"),
        ([normal(4, 6), normal(4, 3)], r"^rvq: codebook 1.*\[4, 3\].*\[4, 6\]"),
        ([normal(4, 6), normal(1, 4, 6)], r"^rvq: codebook 1.*\[1, 4, 6\]"),
        ([normal(4, 5)], r"^rvq: x \[\.\.\., 6\].*length 5"),
    ],
)
def test_codebooks_that_do_not_fit(codebooks, message):
    with pytest.raises(ValueError, match=message):
        rvq(normal(3, 6), codebooks)
    with pytest.raises(TypeError, match=r"^rvq: codebooks .*sequence.*NoneType"):
        rvq(normal(3, 6), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "tilted"}, "^rvq: estimator 'tilted'"),
        ({"codebook_weight": torch.inf}, "^rvq: codebook_weight.*finite.*inf"),
        ({"codebook_weight": torch.ones(2)}, "^rvq: codebook_weight.*finite"),
        ({"metric": "l1"}, "^rvq: metric 'l1'"),
        ({"precision": np.ones(2)}, "^rvq: precision .*exact"),
    ],
)
def test_options_that_are_not_known(options, message):
    with pytest.raises(ValueError, match=message):
        rvq(normal(3, 6), normal(2, 4, 6), **options)


@pytest.mark.parametrize("codebooks", [[], [normal(4, 3), normal(4, 6)], [normal(1, 4, 6), normal(4, 6)]])
@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_a_direct_call_is_checked(codebooks):
    with pytest.raises(RuntimeError, match=r"^rvq: "):
        torch.ops.uefl.rvq(normal(3, 6), codebooks, "l2", True, False, 1.0, 0.25, False)
