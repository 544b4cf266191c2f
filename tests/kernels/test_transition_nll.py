"""transition_nll: worked numbers, properties, and the compiled kernel against the float64 reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from uefl_kernels import backend, log_transition_matrix, transition_nll

from .conftest import DTYPES, normal
from .transition_cases import (
    CASES,
    LOGITS,
    PRIORS,
    SETS,
    TARGET,
    TARGETS,
    assert_near,
    equal,
    transition_case,
)

BACKENDS = ("auto", "reference")


def loss_and_gradient(logits, *arguments, **options):
    logits = logits.clone().requires_grad_()
    loss = transition_nll(logits, *arguments, **options)
    loss.sum().backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("name", BACKENDS)
def test_worked_example(name):
    matrix = log_transition_matrix(PRIORS, SETS, TARGET)
    equal(matrix.exp().sum(0), [0.76, 1.2, 1.3])
    with backend(name):
        loss, gradient = loss_and_gradient(LOGITS, TARGETS, matrix)
        equal(loss, [0.5856166203, 1.4474303611, 1.9831176379])
        equal(gradient[0], [-0.2214921016, 0.0323464133, 0.1891456884])
        equal(gradient[1], [0.1026940517, 0.1507068552, -0.2534009069])
        equal(gradient[2], [0.0003382479, -0.0086082968, 0.0082700489])
        equal(
            transition_nll(LOGITS, TARGETS, log_transition_matrix(PRIORS, SETS)),
            [0.4424958973, 1.6094379124, 1.9805468137],
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_extreme_logits_and_a_zero_prior(name, dtype):
    matrix = log_transition_matrix(PRIORS, SETS, TARGET)
    matrix[0, 2] = -torch.inf
    logits = torch.tensor([[1000, -1000, 0], [-1e4, -1e4, 1e4]], dtype=dtype)
    with backend(name):
        loss, gradient = loss_and_gradient(logits, torch.tensor([1, 0]), matrix)
    torch.testing.assert_close(
        loss,
        torch.tensor([2.5389738711, 20000.285664], dtype=dtype),
        rtol=max(1e-9, 2 * torch.finfo(dtype).eps),
        atol=0,
    )
    assert gradient.isfinite().all()


@pytest.mark.every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, dtype):
    logits, targets, matrix, groups = transition_case(case, dtype)
    with backend("reference"):
        expected = loss_and_gradient(logits, targets, matrix, groups=groups)
    for found, wanted in zip(
        loss_and_gradient(logits, targets, matrix, groups=groups), expected, strict=True
    ):
        assert found.dtype == wanted.dtype
        assert_near(found, wanted, dtype)
        assert found.isfinite().all()


@pytest.mark.every_variant
@pytest.mark.parametrize("name", BACKENDS)
def test_a_class_that_is_too_rare_for_float32(name):
    matrix = torch.tensor([[-100, -torch.inf], [-torch.inf, 0]])
    with backend(name):
        found = loss_and_gradient(torch.tensor([[0.0, -200.0]]), torch.tensor([0]), matrix)
    for value in found:
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_probabilities(name):
    logits, targets, matrix, _ = transition_case("small", torch.float64)
    g = logits.softmax(1) @ matrix.exp().T
    with backend(name):
        found = transition_nll(logits, targets, matrix)
    torch.testing.assert_close(
        found,
        F.nll_loss((g / g.sum(1, keepdim=True)).log(), targets, reduction="none"),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_gradcheck(name):
    logits, targets, matrix, groups = transition_case("groups", torch.float64)
    with backend(name):
        few = slice(0, 9)
        assert torch.autograd.gradcheck(
            lambda z: transition_nll(z, targets[few], matrix, groups=groups[few]),
            logits[few].clone().requires_grad_(),
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_class_that_no_set_has_gets_no_gradient(name):
    logits, targets, matrix, _ = transition_case("small")
    logits[:, 3] = 50.0  # also if its logit is by far the largest
    with backend(name):
        loss, gradient = loss_and_gradient(logits, targets, matrix)
    assert loss.isfinite().all()
    assert not gradient[:, 3].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", BACKENDS)
def test_invariances(name):
    logits, targets, matrix, _ = transition_case("small", torch.float64)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    with backend(name):
        loss, gradient = loss_and_gradient(logits, targets, matrix)
        shifted = transition_nll(logits + 7, targets, matrix)
        scaled = transition_nll(logits, targets, matrix + 5)
        permuted = transition_nll(
            logits, torch.where(targets < 0, targets, order.argsort()[targets.clamp(min=0)]), matrix[order]
        )
    for other in (shifted, scaled, permuted):
        torch.testing.assert_close(other, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient.sum(1), torch.zeros(30, dtype=torch.float64), rtol=0, atol=1e-14)
    assert gradient.abs().max() <= 1


@pytest.mark.parametrize("name", BACKENDS)
def test_sets_of_one_class_are_labels(name):
    """With one set per class, the loss is the cross-entropy of logits plus the log of the client's prior."""
    logits, labels = normal(20, 5, dtype=torch.float64), torch.arange(20) % 5
    prior = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    identity = torch.eye(5, dtype=torch.float64)
    with backend(name):
        adjusted = transition_nll(logits, labels, log_transition_matrix(identity, prior))
        plain = transition_nll(logits, labels, log_transition_matrix(identity, prior, prior))
    expected = F.cross_entropy(logits + (prior * 5).log(), labels, reduction="none")
    torch.testing.assert_close(adjusted, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        plain, F.cross_entropy(logits, labels, reduction="none"), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_identical_sets_have_no_gradient(name):
    matrix = log_transition_matrix(torch.full((4, 5), 0.2, dtype=torch.float64))
    with backend(name):
        _, gradient = loss_and_gradient(normal(9, 5), torch.arange(9) % 4, matrix)
    torch.testing.assert_close(gradient, torch.zeros(9, 5), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", BACKENDS)
def test_groups_equal_a_loop_over_the_groups(name):
    logits, targets, matrix, groups = transition_case("groups")
    with backend(name):
        together = transition_nll(logits, targets, matrix, groups=groups)
        for g in range(3):
            rows = groups == g
            assert torch.equal(
                together[rows], transition_nll(logits[rows], targets[rows], matrix[g, : 6 - g])
            )


@pytest.mark.parametrize("name", BACKENDS)
def test_given_marginal(name):
    logits, targets, matrix, groups = transition_case("groups")
    with backend(name):
        expected = transition_nll(logits, targets, matrix, groups=groups)
        assert torch.equal(
            transition_nll(logits, targets, matrix, groups=groups, log_marginal=matrix.logsumexp(1)), expected
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_ignored_rows(name):
    logits, targets, matrix, _ = transition_case("small")
    logits[2] = torch.nan
    with backend(name):
        loss, gradient = loss_and_gradient(logits, targets, matrix)
        assert loss[2] == 0
        assert not gradient[2].any()
        other = transition_nll(logits, torch.where(targets < 0, 1000, targets), matrix, ignore_index=1000)
    assert torch.equal(other, loss)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", BACKENDS)
def test_logits_that_are_not_finite_stay_in_their_row(name, value):
    logits, targets, matrix, _ = transition_case("small")
    logits[5, 1] = value
    with backend(name):
        loss, gradient = loss_and_gradient(logits, targets, matrix)
    assert loss.isnan().nonzero().tolist() == [[5]]
    assert gradient.isnan().any(1).nonzero().tolist() == [[5]]


@pytest.mark.parametrize("name", BACKENDS)
def test_logits_of_minus_infinity_are_classes_ruled_out(name):
    logits, targets, matrix, _ = transition_case("small")
    logits[:, 4] = -torch.inf
    keep = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    with backend(name):
        loss, gradient = loss_and_gradient(logits, targets, matrix)
        expected, _ = loss_and_gradient(logits[:, keep], targets, matrix[:, keep])
    torch.testing.assert_close(loss, expected)
    assert not gradient[:, 4].any()


@pytest.mark.parametrize("name", BACKENDS)
def test_set_without_possible_classes_has_infinite_loss(name):
    matrix = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.4, 0.6]]).log()
    logits = torch.tensor([[1.0, -torch.inf, 2.0], [1.0, -torch.inf, -torch.inf], [1.0, 0.5, 2.0]])
    with backend(name):
        loss, gradient = loss_and_gradient(logits, torch.zeros(3, dtype=torch.int64), matrix)
    assert loss[0] == torch.inf
    assert loss.isnan().tolist() == [False, True, False]  # row 1 allows only class 0, which no set has
    assert gradient.isnan().all(1).tolist() == [True, True, False]


def test_strides():
    logits, targets, matrix, groups = transition_case("groups")
    expected = loss_and_gradient(logits, targets, matrix, groups=groups)
    for view in (
        logits.T.contiguous().T,
        normal(20, 25)[:, ::2][:, :10].copy_(logits),
        normal(10, 40)[:, ::2].T.copy_(logits),
    ):
        twice = torch.stack([targets, targets], 1)[:, 0], matrix.mT.contiguous().mT
        found = transition_nll(view, *twice, groups=torch.stack([groups, groups], 1)[:, 1])
        assert torch.equal(found, expected[0])


def test_second_derivative_raises():
    logits, targets, matrix, _ = transition_case("small")
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(
        transition_nll(logits, targets, matrix).sum(), logits, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"^transition_nll: .*create_graph"):
        gradient.sum().backward()


def test_opcheck():
    logits, targets, matrix, groups = transition_case("groups")
    for with_gradient in (True, False):
        arguments = logits, targets, matrix, matrix.logsumexp(1), groups, -100, with_gradient
        torch.library.opcheck(torch.ops.uefl.transition_nll.default, arguments)


def test_compile_fullgraph(full_graph):
    _, targets, matrix, _ = transition_case("small")
    targets = targets.clamp(min=0)

    def step(z):
        return transition_nll(z * 2, targets[: len(z)], matrix).mean()

    compiled = full_graph(step, dynamic=True)
    for rows in (30, 20):
        gradients = []
        for function in (step, compiled):
            z = normal(rows, 10).requires_grad_()
            function(z).backward()
            gradients.append(z.grad)
        torch.testing.assert_close(*gradients)


def test_autocast():
    layer, (_, targets, matrix, _) = torch.nn.Linear(8, 10), transition_case("small")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = layer(normal(30, 8))
        loss = transition_nll(logits, targets, matrix)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.mean().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.every_variant
def test_bits_do_not_depend_on_threads_or_the_batch():
    logits, targets, matrix = (
        normal(40_000, 10, scale=3),
        torch.randint(8, (40_000,)),
        log_transition_matrix(torch.rand(8, 10).softmax(1)).float(),
    )
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            results.append(loss_and_gradient(logits, targets, matrix))
    finally:
        torch.set_num_threads(threads)
    results.append(
        tuple(
            map(
                torch.cat,
                zip(
                    *(
                        loss_and_gradient(z, y, matrix)
                        for z, y in zip(logits.split(7777), targets.split(7777), strict=True)
                    ),
                    strict=True,
                ),
            )
        )
    )
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
