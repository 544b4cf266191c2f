"""vq: outputs against the reference, gradients against autograd on the formula of the docstring."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from uefl_kernels import COMPILED, backend, vq, vq_assign, vq_with_sums

from .conftest import DTYPES, normal

BACKENDS = ("auto", "reference")
RESULTS = ("quantized", "indices", "loss", "counts", "sums")


def compare(x: torch.Tensor, codebook: torch.Tensor, metric: str = "l2", with_sums: bool = True) -> None:
    arguments = (x, codebook, metric, True, with_sums, 1.0, 0.25, False)
    expected = torch.ops.uefl_reference.vq(*arguments)
    for name, got, want in zip(RESULTS, torch.ops.uefl.vq(*arguments), expected, strict=True):
        assert got.dtype == want.dtype, name
        assert got.shape == want.shape, name
        if name == "loss":
            tolerance = 1e-12 if x.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(got, want, rtol=tolerance, atol=0, equal_nan=True)
        else:
            # sums and quantized have equal bits
            assert torch.equal(got.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0)), name


def eager(x, codebook, codebook_weight=1.0, commitment_weight=0.25, metric="l2"):
    indices = vq_assign(x, codebook, metric=metric)
    if codebook.dim() == 2:
        q = codebook[indices].reshape(x.shape)
    else:
        q = torch.stack([codewords[indices[..., s]] for s, codewords in enumerate(codebook)], -2).reshape(
            x.shape
        )
    loss = codebook_weight * F.mse_loss(q, x.detach()) + commitment_weight * F.mse_loss(x, q.detach())
    return x + (q - x).detach(), loss


@pytest.mark.every_variant
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-segment"])
@pytest.mark.parametrize("n", [1, 11, 700])
def test_matches_the_reference(n, shared, metric):
    for d, k in ((1, 3), (7, 33), (16, 32), (33, 100)):
        codebook = normal(k, d, seed=1) if shared else normal(3, k, d, seed=1)
        compare(normal(n, 3 * d), codebook, metric)


@pytest.mark.parametrize("codebook_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, codebook_dtype):
    compare(normal(300, 24, dtype=dtype), normal(20, 12, seed=1, dtype=codebook_dtype))


@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1.0, 1e15, 1e37])
def test_scales(scale):
    compare(normal(500, 9, scale=scale), normal(20, 9, seed=1, scale=scale))


@pytest.mark.parametrize("scale", [1e-310, 1e-280, 1e-150, 1e140])
def test_scales_float64(scale):
    compare(
        normal(500, 9, scale=scale, dtype=torch.float64),
        normal(20, 9, seed=1, scale=scale, dtype=torch.float64),
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 65, 128, 129])
def test_fixed_point_unit_follows_the_number_of_rows(rows):
    compare(normal(rows, 5, offset=3), normal(2, 5, seed=1))


@pytest.mark.parametrize("ratio", [0.1 * 2.0**-30, 1.0, 9.0, 100.0, 2.0**40])
def test_fixed_point_unit_follows_the_length_of_the_rows(ratio):
    """In the unit of the codewords, sums of long rows would overflow, and short rows would lose bits."""
    compare(torch.full((64, 4), ratio), torch.tensor([[1.0] * 4, [-1.0] * 4]))


def test_outputs_of_many_blocks_of_rows():
    compare(normal(20_000, 6), normal(20, 3, seed=1))


def test_views_are_read_in_place_and_written_densely():
    codebook = normal(17, 8, seed=1)
    for x in (
        normal(2, 24, 5, 7).permute(0, 2, 3, 1),
        normal(24, 30).T,
        normal(1, 24).expand(9, 24),
        normal(40, 60)[::2, 2:50:2],
    ):
        compare(x, codebook)
        assert vq(x, codebook).quantized.is_contiguous()


def test_rows_that_are_not_finite():
    x, codebook = normal(60, 6), normal(10, 6, seed=1)
    x[3, 2], x[10, 0], x[20, 5] = float("nan"), float("inf"), float("-inf")
    compare(x, codebook)
    out = vq(x, codebook)
    assert out.indices[3].item() == 0
    assert out.loss.isnan()
    assert out.quantized.isfinite().all()


def codebook_gradients(x, codebook, metric="l2"):
    """Return our result and the result of the formula, both in float64."""
    gradients = []
    for function in (lambda b: vq(x, b, metric=metric).loss, lambda b: eager(x, b, metric=metric)[1]):
        codewords = codebook.clone().requires_grad_()
        function(codewords).backward()
        gradients.append(codewords.grad)
    return gradients


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-segment"])
@pytest.mark.parametrize("name", BACKENDS)
def test_outliers_do_not_change_other_gradients(name, shared):
    codebook = normal(2, 12, 4, dtype=torch.float64)
    for code, scale in enumerate((1e16, 1e20, 1e-20, 1e-16, 1e20)):
        codebook[:, code] *= scale
    taken = torch.randint(12, (300,), generator=torch.Generator().manual_seed(0))
    x = (
        (codebook[:, taken] * normal(2, 300, 1, seed=1, offset=1, scale=0.1, dtype=torch.float64))
        .transpose(0, 1)
        .reshape(300, 8)
    )
    codebook = codebook[0] if shared else codebook
    with backend(name):
        got, want = codebook_gradients(x, codebook)
    assert (want.abs().amax(-1) > 0).all()
    assert ((got - want).abs() <= 1e-9 * want.abs().amax(-1, keepdim=True)).all()
    compare(x, codebook)
    compare(x.float(), codebook.float())


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_that_are_not_finite_spoil_only_their_codewords(name, value, metric):
    x, codebook = normal(200, 4, dtype=torch.float64), normal(9, 4, seed=1, dtype=torch.float64)
    x[7, 2], x[30, 0] = value, value
    with backend(name):
        got, want = codebook_gradients(x, codebook, metric)
    finite = want.isfinite().all(1)
    assert 0 < int(finite.sum()) < 9
    assert got[~finite].isnan().all()
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-12, atol=1e-14)
    compare(x, codebook, metric)


def test_infinite_row_makes_the_loss_infinite():
    x = normal(60, 6)
    x[10, 0] = float("inf")
    compare(x, normal(10, 6, seed=1))


@pytest.mark.parametrize("name", BACKENDS)
def test_no_rows(name):
    x, codebook = torch.empty(0, 4, 6, requires_grad=True), normal(5, 3).requires_grad_()
    with backend(name):
        out = vq(x, codebook)
    assert out.loss.item() == 0
    assert out.indices.shape == (0, 4, 2)
    assert out.counts.tolist() == [0] * 5
    out.loss.backward()
    assert codebook.grad is not None
    assert not codebook.grad.any()
    compare(x.detach(), codebook.detach())


def test_counts_and_loss_equal_the_docstring():
    x, codebook = normal(200, 6), normal(9, 3, seed=1)
    out = vq(x, codebook, codebook_weight=0.5, commitment_weight=0.125)
    assert torch.equal(out.counts, torch.bincount(out.indices.flatten(), minlength=9))
    torch.testing.assert_close(out.loss, 0.625 * F.mse_loss(x, codebook[out.indices].reshape(x.shape)))
    assert torch.equal(out.quantized, codebook[out.indices].reshape(x.shape))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-segment"])
@pytest.mark.parametrize("name", BACKENDS)
def test_sums_are_returned_if_requested(name, shared):
    x, codebook = normal(200, 6), normal(9, 3, seed=1) if shared else normal(2, 9, 3, seed=1)
    with backend(name):
        out, sums = vq_with_sums(x, codebook)
        assert len(vq(x, codebook)) == len(out) == 4
    assert sums.dtype == torch.float64
    assert sums.shape == codebook.shape
    expected = torch.zeros(codebook.shape[:-1].numel(), 3, dtype=torch.float64)
    rows = out.indices if shared else out.indices + torch.tensor([0, 9])
    expected.index_add_(0, rows.flatten(), x.reshape(-1, 3).double())
    # 200 values below 4, in units of 2^-52
    torch.testing.assert_close(sums, expected.view_as(sums), rtol=0, atol=1e-12)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-segment"])
@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_equal_the_composition(name, shared, metric):
    x, codebook = normal(50, 12, dtype=torch.float64), normal(7, 4, seed=1, dtype=torch.float64)
    if not shared:
        codebook = normal(3, 7, 4, seed=1, dtype=torch.float64)
    weight = normal(50, 12, seed=2, dtype=torch.float64)
    gradients = []
    with backend(name):
        for function in (lambda a, b: vq(a, b, metric=metric)[:3:2], lambda a, b: eager(a, b, metric=metric)):
            a, b = x.clone().requires_grad_(), codebook.clone().requires_grad_()
            quantized, loss = function(a, b)
            ((quantized * weight).sum() + 3 * loss).backward()
            gradients.append((a.grad, b.grad))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_quantized_gives_no_gradient_to_the_codebook():
    x, codebook = normal(20, 4).requires_grad_(), normal(5, 4, seed=1).requires_grad_()
    vq(x, codebook).quantized.sum().backward()
    assert torch.equal(x.grad, torch.ones(20, 4))
    assert not codebook.grad.any()


@pytest.mark.parametrize("name", BACKENDS)
def test_gradcheck_of_each_term(name):
    """The loss has a stop-gradient on one side of each term.

    So each term is differentiated with the other's weight at zero.
    """
    x, codebook = normal(6, 4, dtype=torch.float64), normal(3, 2, seed=1, dtype=torch.float64)
    with backend(name):
        commitment = lambda a: vq(a, codebook, codebook_weight=0.0, commitment_weight=0.7).loss  # noqa: E731
        movement = lambda b: vq(x, b, codebook_weight=0.7, commitment_weight=0.0).loss  # noqa: E731
        assert torch.autograd.gradcheck(commitment, x.clone().requires_grad_())
        assert torch.autograd.gradcheck(movement, codebook.clone().requires_grad_())


@pytest.mark.parametrize("name", BACKENDS)
def test_a_second_derivative_raises(name):
    x, codebook = normal(6, 4).requires_grad_(), normal(3, 2, seed=1).requires_grad_()
    with backend(name):
        first = torch.autograd.grad(vq(x, codebook).loss, (x, codebook), create_graph=True)
    for gradient in first:
        with pytest.raises(RuntimeError, match=r"^vq: .*create_graph"):
            gradient.sum().backward(retain_graph=True)


@pytest.mark.parametrize("name", ["uefl", "uefl_reference"])
def test_gradient_of_the_codebook_without_its_sums_raises(name):
    x, codebook = normal(6, 4).requires_grad_(), normal(3, 2, seed=1).requires_grad_()
    op = getattr(torch.ops, name).vq
    with pytest.raises(RuntimeError, match=r"^vq: with_sums=False.*gradient"):
        op(x, codebook, "l2", True, False, 1.0, 0.25, False)[2].backward()
    op(x, codebook, "l2", True, False, 0.0, 0.25, False)[2].backward()  # a weight of 0 needs no sums
    assert not codebook.grad.any()
    assert x.grad.any()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_function_transforms():
    x, codebook = normal(3, 6, 4), normal(3, 2, seed=1)
    with pytest.raises(RuntimeError, match=r"torch\.func\.grad"):
        torch.func.grad(lambda a: vq(a, codebook).loss)(x)
    losses = torch.func.vmap(lambda a: vq(a, codebook).loss)(x)
    assert torch.equal(losses, torch.stack([vq(a, codebook).loss for a in x]))


@pytest.mark.parametrize("name", BACKENDS)
def test_half_precision_input_with_a_float32_codebook(name):
    x, codebook = normal(40, 8, dtype=torch.bfloat16).requires_grad_(), normal(6, 8, seed=1).requires_grad_()
    with backend(name):
        out = vq(x, codebook)
    assert out.quantized.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    (out.quantized.float().sum() + out.loss).backward()
    assert x.grad.dtype == torch.bfloat16
    assert codebook.grad.dtype == torch.float32


def test_autocast():
    layer, codebook = torch.nn.Linear(8, 8), normal(6, 8, seed=1).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = vq(layer(normal(40, 8)), codebook)
    assert out.quantized.dtype == torch.bfloat16
    (out.quantized.float().sum() + out.loss).backward()
    assert layer.weight.grad.isfinite().all()
    assert codebook.grad.any()


@pytest.mark.parametrize("with_sums", [True, False])
def test_opcheck(with_sums):
    arguments = (
        normal(4, 5, 6).requires_grad_(),
        normal(7, 3, seed=1).requires_grad_(),
        "l2",
        True,
        with_sums,
        1.0,
        0.25,
        False,
    )
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    # Without sums there is no gradient of the codebook to check. vq() asks for sums if the codebook needs a
    # gradient.
    torch.library.opcheck(
        torch.ops.uefl.vq.default, arguments, test_utils=utilities if with_sums else utilities[:3]
    )


def test_compile_fullgraph(full_graph):
    codebook = normal(9, 4, seed=1).requires_grad_()

    def step(x):
        out = vq(x * 2, codebook)
        return out.quantized.sum() + out.loss, out.counts

    x = normal(33, 8)
    loss, counts = full_graph(step)(x)
    loss.backward()
    compiled_grad, codebook.grad = codebook.grad, None
    expected, expected_counts = step(x)
    expected.backward()
    # inductor adds the elements of quantized in another order
    torch.testing.assert_close(loss, expected)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(compiled_grad, codebook.grad)


@pytest.mark.every_variant
@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_number_of_threads_does_not_change_a_bit():
    x = normal(30000, 24)
    x[::1000] *= 1e16  # then codewords have different units
    arguments = (x, normal(16, 8, seed=1), "l2", True, True, 1.0, 0.25, False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = torch.ops.uefl.vq(*arguments)
        torch.set_num_threads(2)
        two = torch.ops.uefl.vq(*arguments)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_uninitialized_memory_does_not_leak():
    """Deterministic algorithms make torch fill new memory with NaN and the largest integer.

    An op must overwrite all of it.
    """
    x, codebook = normal(50, 12), normal(7, 4, seed=1)
    expected = torch.ops.uefl.vq(x, codebook, "l2", True, True, 1.0, 0.25, False)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        poisoned = torch.ops.uefl.vq(x, codebook, "l2", True, True, 1.0, 0.25, False)
        assert torch.equal(vq_assign(x, codebook), expected[1])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(poisoned, expected, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_codebook_that_is_not_finite(name):
    codebook = normal(5, 3)
    codebook[2, 1] = float("nan")
    with backend(name), pytest.raises(RuntimeError, match=r"^vq:.*codebook.*NaN"):
        vq(normal(4, 3), codebook)


def test_errors_name_the_op():
    with pytest.raises(ValueError, match=r"^vq: x \[..., 5\].*length 3"):
        vq(torch.zeros(4, 5), torch.zeros(5, 3))
    with pytest.raises(TypeError, match=r"^vq: codebook.*torch\.Tensor.*ndarray"):
        vq(torch.zeros(3, 4), np.zeros((5, 4)))
    with pytest.raises(TypeError, match=r"^vq: x .*torch\.int64"):
        vq(torch.zeros(4, 6).long(), torch.zeros(5, 3))


@pytest.mark.parametrize("weight", [float("nan"), -float("inf"), "1", torch.ones(2)], ids=str)
def test_a_weight_that_is_no_finite_number(weight):
    for name in ("commitment_weight", "codebook_weight"):
        with pytest.raises(ValueError, match=rf"^vq: {name}.*finite"):
            vq(normal(4, 6), normal(5, 3), **{name: weight})


def test_weights_that_change_under_compile(full_graph):
    x, codebook = normal(9, 6), normal(5, 3)
    compiled = full_graph(lambda weight: vq(x, codebook, commitment_weight=weight).loss)
    for weight in (0.25, 0.5, 0.75):
        assert torch.equal(compiled(weight), vq(x, codebook, commitment_weight=weight).loss)


def test_an_estimator_that_is_not_known():
    with pytest.raises(ValueError, match=r"^vq: estimator 'gumbel'.*\('straight_through', 'rotation'\)"):
        vq(normal(4, 6), normal(5, 3), estimator="gumbel")


@pytest.mark.parametrize("position", [0, 1])
def test_forward_mode_raises(position):
    arguments = [normal(4, 6), normal(5, 3)]
    with forward_ad.dual_level():
        arguments[position] = forward_ad.make_dual(arguments[position], torch.ones_like(arguments[position]))
        with pytest.raises(RuntimeError, match=r"^vq: .*forward-mode"):
            vq(*arguments)
