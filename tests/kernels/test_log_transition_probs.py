"""log_transition_probs, and the loss of the published code, which uses it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from uefl_kernels import (
    backend,
    log_transition_matrix,
    log_transition_probs,
    transition_double_softmax,
    transition_nll,
)

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


def probs_and_gradient(logits, matrix, groups):
    """Return the results, and the gradient for random weights, which absent sets ignore."""
    logits = logits.clone().requires_grad_()
    log_g = log_transition_probs(logits, matrix, groups=groups)
    weight = normal(*log_g.shape, seed=5, dtype=log_g.dtype)
    log_g.backward(weight)
    return log_g.detach(), logits.grad


@pytest.mark.parametrize("name", BACKENDS)
def test_worked_example(name):
    with backend(name):
        g = log_transition_probs(LOGITS, log_transition_matrix(PRIORS, SETS, TARGET)).exp()
    equal(g[0], [0.5567624449, 0.1714529337, 0.1981079588, 0.0736766626])
    equal(g[1], [0.3149284254, 0.3404907975, 0.2351738241, 0.1094069530])
    equal(g[2], [0.2190067821, 0.4919005180, 0.1514532421, 0.1376394577])


@pytest.mark.parametrize("name", BACKENDS)
def test_worked_example_of_the_double_softmax(name):
    matrix, logits = log_transition_matrix(PRIORS, SETS), LOGITS.clone().requires_grad_()
    with backend(name):
        loss = transition_double_softmax(logits, TARGETS, matrix)
        loss.sum().backward()
    equal(loss, [1.0222038047, 1.4425355295, 1.5092377050])
    equal(logits.grad[0], [-0.0674020356, 0.0140862260, 0.0533158096])
    equal(logits.grad[1], [0.0310144318, 0.0201259806, -0.0511404124])
    equal(logits.grad[2], [5.1824624e-5, -3.2327367e-4, 2.7144905e-4])


@pytest.mark.parametrize(
    ("target", "wrong", "message"),
    [
        (5, 0.0, r"transition_double_softmax: targets\[1\].*5.*0 to 3"),
        (2, -torch.inf, (r"transition_double_softmax: targets\[1\].*2.*group 0.*-inf")),
        (2, torch.nan, "transition_double_softmax: log_transition.*group 0.*NaN"),
    ],
)
def test_the_double_softmax_refuses_what_the_loss_refuses(target, wrong, message):
    matrix, targets = log_transition_matrix(PRIORS, SETS), torch.tensor([0, target, -100])
    matrix[2] += wrong
    for loss in (transition_double_softmax, transition_nll):
        with pytest.raises(RuntimeError, match=message.replace("transition_double_softmax", loss.__name__)):
            loss(LOGITS, targets, matrix)


@pytest.mark.every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, dtype):
    logits, _, matrix, groups = transition_case(case, dtype)
    with backend("reference"):
        expected = probs_and_gradient(logits, matrix, groups)
    for found, wanted in zip(probs_and_gradient(logits, matrix, groups), expected, strict=True):
        assert found.dtype == wanted.dtype
        # the gradient adds M softmaxes, which may cancel
        assert_near(found, wanted, dtype, terms=max(1.0, matrix.shape[-2] / 4))


@pytest.mark.every_variant
@pytest.mark.parametrize("name", BACKENDS)
def test_a_marginal_that_is_too_small_for_float32(name):
    logits, marginal = torch.tensor([[0.0, -200.0]]), torch.tensor([-100.0, 0.0])
    with backend(name):
        found = log_transition_probs(logits, torch.zeros(1, 2), log_marginal=marginal)
    torch.testing.assert_close(found, torch.tensor([[100.0]]))


@pytest.mark.parametrize("name", BACKENDS)
def test_is_the_loss_for_every_set(name):
    logits, _, matrix, groups = transition_case("groups", torch.float64)
    with backend(name):
        log_g = log_transition_probs(logits, matrix, groups=groups)
        for m in range(4):  # the sets that every group has
            torch.testing.assert_close(
                -log_g[:, m], transition_nll(logits, torch.full((20,), m), matrix, groups=groups)
            )
    assert (log_g[groups == 2][:, 4:] == -torch.inf).all()
    torch.testing.assert_close(log_g.logsumexp(1), torch.zeros(20, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_matrix_can_be_undone():
    """With one set per class, the posterior of the classes follows from the posterior of the sets."""
    priors, p = (torch.eye(5, dtype=torch.float64) * 3 + 1) / 8, normal(20, 5, dtype=torch.float64).softmax(1)
    g = log_transition_probs(p.log(), log_transition_matrix(priors)).exp()
    back = torch.linalg.solve(priors, g.T).T
    torch.testing.assert_close(back / back.sum(1, keepdim=True), p)


@pytest.mark.parametrize("name", BACKENDS)
def test_gradcheck(name):
    logits, targets, matrix, groups = transition_case("groups", torch.float64)
    z, y, of = logits[3:9].clone().requires_grad_(), targets[3:9], groups[3:9]
    with backend(name):
        assert torch.autograd.gradcheck(lambda z: log_transition_probs(z, matrix[:, :4], groups=of), z)
        assert torch.autograd.gradcheck(lambda z: transition_double_softmax(z, y, matrix, groups=of), z)


@pytest.mark.parametrize("name", BACKENDS)
def test_double_softmax_of_groups_equals_a_loop(name):
    logits, targets, matrix, groups = transition_case("groups")
    with backend(name):
        together = transition_double_softmax(logits, targets, matrix, groups=groups)
        for g in range(3):
            rows = groups == g
            torch.testing.assert_close(
                together[rows], transition_double_softmax(logits[rows], targets[rows], matrix[g, : 6 - g])
            )
    p = logits.softmax(1) @ matrix[0].exp().T
    expected = F.cross_entropy(p / p.sum(1, keepdim=True), targets, reduction="none")
    torch.testing.assert_close(together[groups == 0], expected[groups == 0])


def test_wrong_values_and_the_second_derivative():
    logits, _, matrix, groups = transition_case("groups")
    with pytest.raises(RuntimeError, match=r"^log_transition_probs: groups\[0\] .*\b5\b.* 0 .*\b2\b"):
        log_transition_probs(logits, matrix, groups=torch.full_like(groups, 5))
    with pytest.raises(ValueError, match=r"^log_transition_probs: logits.*shape"):
        log_transition_probs(logits[0], matrix, groups=groups)
    logits.requires_grad_()
    first = torch.autograd.grad(log_transition_probs(logits, matrix[0]).sum(), logits, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"^log_transition_probs: .*create_graph"):
        first.sum().backward()


def test_opcheck():
    logits, _, matrix, groups = transition_case("groups")
    arguments = logits, matrix, matrix.logsumexp(1), groups
    torch.library.opcheck(torch.ops.uefl.log_transition_probs.default, arguments)
    torch.library.opcheck(torch.ops.uefl.log_transition_probs_backward.default, (normal(20, 6), *arguments))


def test_compile_fullgraph(full_graph):
    logits, targets, matrix, groups = transition_case("groups")

    def step(z):
        targets_there = targets.clamp(min=0)
        loss = transition_double_softmax(z * 2, targets_there, matrix, groups=groups).mean()
        return loss + log_transition_probs(z, matrix[0]).exp().square().mean()

    gradients = []
    for function in (step, full_graph(step)):
        z = logits.clone().requires_grad_()
        function(z).backward()
        gradients.append(z.grad)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


@pytest.mark.every_variant
@pytest.mark.parametrize("shape", [(70, 10, 10), (70, 150, 37)])
def test_bits_do_not_depend_on_other_rows_or_threads(shape):
    b, k, m = shape
    logits, matrix = normal(b, k, scale=3), torch.rand(2, m, k).log()
    groups = (torch.arange(b) // 9) % 2
    together = probs_and_gradient(logits, matrix, groups)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        again = probs_and_gradient(logits, matrix, groups)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, together, again))
    alone = log_transition_probs(logits[3:4], matrix, groups=groups[3:4])
    assert torch.equal(together[0][3:4], alone)
    shuffled = torch.randperm(b)
    assert torch.equal(
        log_transition_probs(logits[shuffled], matrix, groups=groups[shuffled]), together[0][shuffled]
    )
