"""set_proportion_loss against its formula, and the compiled kernel against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from uefl_kernels import backend, set_proportion_loss

from .conftest import DTYPES, normal
from .transition_cases import NO_DISTRIBUTION, assert_near, proportion_case

BACKENDS = ("auto", "reference")


def loss_and_gradient(logits, offsets, proportions):
    logits = logits.clone().requires_grad_()
    loss = set_proportion_loss(logits, offsets, proportions)
    (loss * torch.arange(1, len(loss) + 1)).sum().backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_formula_and_its_gradient(name):
    logits, offsets, proportions = proportion_case(torch.float64)
    expected = logits.clone().requires_grad_()
    bounds = offsets.tolist()
    losses = [
        -(t * expected[begin:end].softmax(1).mean(0).log()).sum()
        for begin, end, t in zip(bounds[:-1], bounds[1:], proportions, strict=True)
    ]
    sum(i * loss for i, loss in enumerate(losses, 1)).backward()
    with backend(name):
        loss, gradient = loss_and_gradient(logits, offsets, proportions)
    torch.testing.assert_close(loss, torch.stack(losses).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.every_variant
@pytest.mark.parametrize("scale", [1.0, 10.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(dtype, scale):
    for n, k in ((100, 7), (13, 1), (50, 16), (40, 130)):
        case = proportion_case(dtype, n, k, scale)
        with backend("reference"):
            expected = loss_and_gradient(*case)
        for found, wanted in zip(loss_and_gradient(*case), expected, strict=True):
            assert found.dtype == wanted.dtype
            assert found.isfinite().all()
            assert_near(found, wanted, dtype)


@pytest.mark.parametrize("name", BACKENDS)
def test_gradcheck(name):
    logits, _, proportions = proportion_case(torch.float64, 12, 4)
    with backend(name):
        assert torch.autograd.gradcheck(
            lambda z: set_proportion_loss(z, torch.tensor([0, 1, 5, 8, 12]), proportions),
            logits.requires_grad_(),
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_probability_below_float32_has_the_right_loss(name):
    """Every probability of class 1 is e^-200.

    The plain formula takes the logarithm of zero.
    """
    logits = torch.tensor([[200.0, 0.0], [200.0, 0.0]])
    with backend(name):
        loss, gradient = loss_and_gradient(logits, torch.tensor([0, 2]), torch.tensor([[0.5, 0.5]]))
    torch.testing.assert_close(loss, torch.tensor([100.0]))
    torch.testing.assert_close(gradient, torch.tensor([[0.25, -0.25], [0.25, -0.25]]))


@pytest.mark.every_variant
def test_probabilities_that_underflow_count_together():
    """float32 has the first probability, and flushes each of the many others, which are a little smaller."""
    logits = torch.tensor([[0.0, -86.0]] + [[0.0, -88.0]] * 60)
    case = logits, torch.tensor([0, 61]), torch.tensor([[0.5, 0.5]])
    with backend("reference"):
        expected = loss_and_gradient(*case)
    for found, wanted in zip(loss_and_gradient(*case), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_that_are_not_finite_stay_in_their_set(name):
    logits, offsets, proportions = proportion_case()
    logits[40, 2] = torch.nan
    with backend(name):
        loss, gradient = loss_and_gradient(logits, offsets, proportions)
    assert loss.isnan().tolist() == [False, False, True, False]
    assert not gradient[:33].isnan().any()
    assert not gradient[50:].isnan().any()
    assert gradient[33:50].isnan().any()


@pytest.mark.parametrize(("logits", "proportions"), NO_DISTRIBUTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_without_a_distribution_makes_its_set_nan(name, dtype, logits, proportions):
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    with backend(name):
        offsets = torch.tensor([0, len(logits)])
        loss, gradient = loss_and_gradient(
            torch.tensor(logits, dtype=dtype), offsets, torch.tensor([proportions], dtype=exact)
        )
    assert loss.isnan().all()
    assert gradient.isnan().any(1).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_logits_of_minus_infinity_are_classes_ruled_out(name):
    out = -torch.inf
    logits = torch.tensor(
        [[0.0, out, 1.0], [0.0, 1.0, 2.0], [0.0, out, 1.0], [0.0, out, 2.0], [0.0, out, 1.0]]
    )
    proportions = torch.tensor([[0.5, 0.2, 0.3], [0.5, 0.0, 0.5], [0.5, 0.2, 0.3]])
    with backend(name):
        loss, gradient = loss_and_gradient(logits, torch.tensor([0, 2, 4, 5]), proportions)
        expected, _ = loss_and_gradient(logits[2:4, [0, 2]], torch.tensor([0, 2]), proportions[1:2, [0, 2]])
    assert loss[0].isfinite()  # row 1 of this set allows class 1
    torch.testing.assert_close(loss[1:2], expected)
    assert loss[2] == torch.inf
    assert gradient.isnan().any(1).tolist() == [False] * 4 + [True]
    assert not gradient[[0, 2, 3], 1].any()


def test_batched_sets_equal_single_sets_for_any_strides():
    logits, offsets, proportions = proportion_case()
    together = loss_and_gradient(logits, offsets, proportions)[0]
    for s, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        alone = set_proportion_loss(logits[begin:end], torch.tensor([0, end - begin]), proportions[s : s + 1])
        assert torch.equal(alone[0], together[s])
    assert torch.equal(
        set_proportion_loss(logits.T.contiguous().T, offsets, proportions.T.contiguous().T), together
    )


def test_opcheck_compile_and_the_second_derivative(full_graph):
    logits, offsets, proportions = proportion_case()
    for with_gradient in (True, False):
        torch.library.opcheck(
            torch.ops.uefl.set_proportion_loss.default, (logits, offsets, proportions, with_gradient)
        )
    gradients = []
    step = lambda z: set_proportion_loss(z * 2, offsets, proportions).mean()  # noqa: E731
    for function in (step, full_graph(step)):
        z = logits.clone().requires_grad_()
        function(z).backward()
        gradients.append(z.grad)
    assert torch.equal(*gradients)
    z = logits.clone().requires_grad_()
    first = torch.autograd.grad(step(z), z, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"^set_proportion_loss: .*create_graph"):
        first.sum().backward()


def test_autocast():
    layer, (_, offsets, proportions) = torch.nn.Linear(8, 7), proportion_case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = set_proportion_loss(layer(normal(100, 8)), offsets, proportions)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert layer.weight.grad.isfinite().all()


Z, BOUNDS, T = torch.zeros(5, 3), torch.tensor([0, 2, 5]), torch.full((2, 3), 1 / 3)
PERCENT = torch.tensor([[1.0], [100.0]])
WRONG = {
    "offsets dtype": ((Z, BOUNDS.int(), T), TypeError, r"offsets.*torch\.int32.*\.to\(torch\.int64\)"),
    "proportions dtype": (
        (Z, BOUNDS, T.bfloat16()),
        TypeError,
        r"proportions.*torch\.bfloat16.*float32.*float64",
    ),
    "logits shape": ((Z[0], BOUNDS, T), ValueError, r"logits.*\[N, K\].*\[3\]"),
    "offsets shape": ((Z, BOUNDS[:1], T), ValueError, r"offsets.*\[S \+ 1\].*\[1\]"),
    "sets differ": ((Z, BOUNDS, T[:1]), ValueError, r"proportions.*\[2, 3\].*\[1, 3\]"),
    "sizes": ((Z, BOUNDS.diff(), T), ValueError, ".*; offsets .*sizes"),
    "list": ((Z.tolist(), BOUNDS, T), TypeError, r"logits.*torch\.Tensor.*list.*torch\.tensor"),
    "learns": ((Z, BOUNDS, T.clone().requires_grad_()), ValueError, "proportions.*gradient"),
    "start": ((Z, BOUNDS + 1, T), RuntimeError, "offsets .*1 to 6.*5 rows.*logits"),
    "end": ((Z[:4], BOUNDS, T), RuntimeError, "offsets .*0 to 5.*4 rows.*logits"),
    "empty set": ((Z, torch.tensor([0, 0, 5]), T), RuntimeError, "set 0 .*0 rows"),
    "descending": ((Z, torch.tensor([0, 7, 5]), T), RuntimeError, r"set 1 .*-2\b"),
    "negative": ((Z, BOUNDS, -T), RuntimeError, r"proportions\[0, 0\].*-0\.333333.*finite"),
    "percent": ((Z, BOUNDS, T * PERCENT), RuntimeError, r"proportions.*set 1.*100.*0\.001"),
    "none": ((Z, BOUNDS, 0 * T), RuntimeError, r"proportions.*set 0 .*0,.*0\.001"),
    "NaN": (
        (Z, BOUNDS, T.index_fill(0, torch.tensor([1]), torch.nan)),
        RuntimeError,
        r"proportions\[1, 0\].*nan",
    ),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case, name):
    arguments, error, message = WRONG[case]
    with backend(name), pytest.raises(error, match=f"^set_proportion_loss: {message}"):
        set_proportion_loss(*arguments)
