"""The transition and set-proportion kernels on a GPU against the float64 reference.

Skipped without one.
"""

import pytest
import torch

from uefl_kernels import backend, log_transition_probs, set_proportion_loss, transition_nll
from uefl_kernels._library import triton_available

from .conftest import DTYPES, captured, cuda_built, no_waiting, normal
from .transition_cases import CASES, assert_near, proportion_case, transition_case

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BACKENDS = {"cuda": lambda: cuda_built("transition_nll"), "triton": triton_available}


@pytest.fixture(params=BACKENDS)
def forced(request):
    if not BACKENDS[request.param]():
        pytest.skip(f"the {request.param} kernels are not built here")
    return request.param


def run(name, device, call, *tensors):
    logits, *others = (tensor if tensor is None else tensor.to(device) for tensor in tensors)
    logits = logits.clone().requires_grad_()
    with backend(name):
        out = call(logits, *others)
        weight = normal(*out.shape, seed=5, dtype=out.dtype).to(device)
        torch.where(out.abs() < torch.inf, out * weight, 0.0).sum().backward()
    return out.detach().cpu(), logits.grad.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_small_transition_equals_the_reference(case, dtype, forced):
    logits, targets, matrix, groups = transition_case(case, dtype)
    for call, terms in (
        (lambda z, y, a, g: transition_nll(z, y, a, groups=g), 1),
        (lambda z, y, a, g: log_transition_probs(z, a, groups=g), max(1.0, matrix.shape[-2] / 4)),
    ):
        tensors = logits, targets, matrix, groups
        for found, expected in zip(
            run(forced, "cuda", call, *tensors), run("reference", "cpu", call, *tensors), strict=True
        ):
            assert_near(found, expected, dtype, terms, units=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_set_proportion_equals_the_reference(dtype, forced):
    for n, k, scale in ((100, 7, 3.0), (13, 1, 3.0), (40, 130, 100.0)):
        case = proportion_case(dtype, n, k, scale)
        for found, expected in zip(
            run(forced, "cuda", set_proportion_loss, *case),
            run("reference", "cpu", set_proportion_loss, *case),
            strict=True,
        ):
            assert_near(found, expected, dtype, max(1.0, scale / 4), units=2)


def test_small_never_waits_and_replays_in_a_graph(forced):
    logits, targets, matrix, groups = (tensor.to("cuda") for tensor in transition_case("groups"))
    marginal = matrix.logsumexp(1)
    with backend(forced):
        call = lambda: transition_nll(logits, targets, matrix, groups=groups, log_marginal=marginal)  # noqa: E731
        graph, found = captured(call)
        with no_waiting():
            call()
        logits.mul_(-2)
        graph.replay()
        assert torch.equal(found, call())
