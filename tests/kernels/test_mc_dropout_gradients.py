"""The gradient of mc_dropout_mlp against autograd and finite differences.

Also torch.compile, autocast and memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from uefl_kernels import mc_dropout_mlp
from uefl_kernels.metrics import entropy
from uefl_kernels.nn import MCDropout
from uefl_kernels.ops.mc_dropout_mlp import composed

from .conftest import normal
from .mc_dropout_cases import assert_close, loss_of, mlp, stacked


@pytest.mark.parametrize("activation", composed.ACTIVATIONS)
@pytest.mark.parametrize("logit_dropout", [False, True])
def test_gradients_match_autograd_over_all_passes(activation, logit_dropout):
    x, weights, biases = mlp((11, 6, 9, 8, 4))
    gradients = []
    for function, dtype in (
        (stacked, torch.float64),
        (mc_dropout_mlp, torch.float32),
        (mc_dropout_mlp, torch.float64),
    ):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *weights, *biases)]
        options = {"p": 0.3, "passes": 4, "activation": activation, "logit_dropout": logit_dropout, "seed": 7}
        loss_of(function(leaves[0], leaves[1:4], leaves[4:], **options)).backward()
        gradients.append([leaf.grad.double() for leaf in leaves])
    for expected, single, double in zip(*gradients, strict=True):
        torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(double, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("consistent", [False, True])
def test_gradcheck(consistent):
    x, weights, biases = mlp((3, 4, 5, 3), torch.float64)

    def run(*leaves):
        return mc_dropout_mlp(
            leaves[0],
            leaves[1:3],
            leaves[3:],
            p=0.3,
            passes=3,
            logit_dropout=True,
            consistent=consistent,
            seed=1,
        )

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in (x, *weights, *biases)], fast_mode=True)


def test_gradient_of_only_the_logits():
    """The network has no layer after the first dropout."""
    x = normal(4, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: mc_dropout_mlp(x, [torch.eye(5).double()], p=0.4, logit_dropout=True, seed=1),
        [x],
        fast_mode=True,
    )


def test_second_derivative_is_an_error():
    x, weights, biases = mlp((3, 4, 5, 3))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(
        mc_dropout_mlp(x, weights, biases, p=0.3, seed=0).entropy.sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"mc_dropout_mlp: .*create_graph"):
        gradient.sum().backward()


def test_opcheck():
    arguments = (
        normal(5, 6).requires_grad_(),
        normal(6 * 4 + 4).requires_grad_(),
        [6, 4],
        [0.3, 0.2],
        3,
        "gelu",
        False,
        torch.tensor(1),
    )
    torch.library.opcheck(torch.ops.uefl.mc_dropout_mlp.default, arguments)
    torch.library.opcheck(torch.ops.uefl.dropout_mask.default, (torch.tensor(1), 3, 9, 0, 0, 0.5, False))


def test_compile_fullgraph(full_graph):
    x, weights, biases = mlp((9, 8, 12, 4))
    weights[0].requires_grad_()
    seeded = full_graph(lambda x: mc_dropout_mlp(x, weights, biases, p=0.3, seed=1))
    stats = seeded(x)
    assert_close(stats, mc_dropout_mlp(x, weights, biases, p=0.3, seed=1), 1e-6)
    loss_of(stats).backward()
    compiled, weights[0].grad = weights[0].grad, None
    loss_of(mc_dropout_mlp(x, weights, biases, p=0.3, seed=1)).backward()
    torch.testing.assert_close(compiled, weights[0].grad)

    follows = full_graph(lambda x: mc_dropout_mlp(x, weights, biases, p=0.3))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(follows(x).mean_probs)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_autocast():
    x, weights, biases = mlp((9, 8, 12, 4))
    with torch.autocast("cpu", torch.bfloat16):
        stats = mc_dropout_mlp(x, weights, biases, p=0.3, seed=1)
    assert stats.mean_probs.dtype == torch.float32
    torch.testing.assert_close(
        stats.mean_probs, mc_dropout_mlp(x, weights, biases, p=0.3, seed=1).mean_probs, atol=0.02, rtol=0
    )


def test_memory_does_not_depend_on_all_passes():
    """The definition and the backward, in Python: peak memory does not grow with the number of passes."""
    x, weights, biases = mlp((200, 16, 64, 10))
    x.requires_grad_()

    def peak(passes):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            loss_of(mc_dropout_mlp(x, weights, biases, p=0.3, passes=passes, seed=1)).backward()
        live = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most

    peak(2)
    assert peak(40) < 1.5 * peak(4)


def test_a_class_of_probability_zero_changes_no_gradient():
    gradients = []
    for classes in (3, 2):
        x, weights, biases = mlp((6, 4, 5, 3), torch.float64)
        biases[-1][2] = -torch.inf
        weights[-1], biases[-1] = weights[-1][:classes], biases[-1][:classes]
        leaves = [t.detach().requires_grad_() for t in (x, *weights, *biases)]
        stats = mc_dropout_mlp(leaves[0], leaves[1:3], leaves[3:], p=0.3, passes=3, seed=1)
        (stats.entropy.sum() + stats.expected_entropy.sum() + stats.variance.sum()).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found[: len(expected)], expected)
        assert not found[len(expected) :].any()


@pytest.mark.parametrize("gap", [200.0, torch.inf])
def test_a_layer_has_finite_gradients_at_probability_zero(gap):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    nn.init.zeros_(model[1].weight)
    model[1].bias.data[2] = -gap
    stats = MCDropout(model, passes=3)(torch.randn(5, 4))
    (stats.entropy + stats.expected_entropy + stats.mutual_info).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_entropy_of_probability_zero_has_gradient_zero():
    probs = torch.tensor([0.0, 0.25, 0.75], requires_grad=True)
    nats = entropy(probs)
    nats.backward()
    assert float(nats.detach()) == pytest.approx(0.562335, rel=1e-5)
    assert probs.grad.tolist() == pytest.approx([0.0, 0.386294, -0.712318], rel=1e-5)
