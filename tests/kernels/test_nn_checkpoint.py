"""Checkpointed regions have the gradients and codewords of plain ones, though the layer runs twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from uefl_kernels import log_transition_probs, vq
from uefl_kernels.nn import ResidualVQ, VectorQuantize

from .conftest import normal

LAYERS = {
    "averages": lambda: VectorQuantize(8, 10),
    "revival": lambda: VectorQuantize(8, 10, threshold_ema_dead_code=2),
    "k-means": lambda: VectorQuantize(8, 10, kmeans_init=True),
    "learned": lambda: VectorQuantize(8, 10, learnable_codebook=True, threshold_ema_dead_code=2),
    "optimizer": lambda: VectorQuantize(
        8,
        10,
        learnable_codebook=True,
        ema_update=False,
        in_place_codebook_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    ),
    "drawn": lambda: VectorQuantize(8, 10, stochastic_sample_codes=True),
    "affine": lambda: VectorQuantize(8, 10, affine_param=True, affine_param_batch_decay=0.5),
    "beams": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=6, beam_size=2, rotation_trick=False),
    "residual": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=6, shared_codebook=False),
    "shared": lambda: ResidualVQ(
        dim=8, num_quantizers=3, codebook_size=6, shared_codebook=True, threshold_ema_dead_code=1
    ),
}


class QuantizedNet(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.quantizer = torch.nn.Linear(8, 8), make()

    def forward(self, x):
        quantized, _, loss = self.quantizer(self.before(x))
        return quantized, loss


def run(model, call, views=1):
    """Take three steps, each with several batches of one shape in flight."""
    for step in range(3):
        model.zero_grad()
        total = 0.0
        for view in range(views):
            torch.manual_seed(10 * step + view)
            x = normal(30, 8, seed=10 * step + view).requires_grad_()
            quantized, loss = call(model, x)
            total = total + (quantized * normal(30, 8, seed=7)).sum() + loss.sum()
        total.backward()
        yield {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }


@pytest.mark.parametrize(
    ("name", "reentrant", "views"),
    [  # every pair of values in the fast tests
        pytest.param(
            name, reentrant, views, marks=() if (i + reentrant) % 2 == (views > 1) else pytest.mark.slow
        )
        for i, name in enumerate(LAYERS)
        for reentrant in (False, True)
        for views in (1, 3)
    ],
)
def test_the_same_as_without(name, reentrant, views):
    plain = QuantizedNet(LAYERS[name])
    model = copy.deepcopy(plain)
    for got, want in zip(
        run(model, lambda m, x: checkpoint(m, x, use_reentrant=reentrant), views),
        run(plain, lambda m, x: m(x), views),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_draws_behind_an_accumulated_batch_are_the_same_again():
    model, gradients = QuantizedNet(LAYERS["revival"]), []

    def region(x):
        quantized, _, loss = model.quantizer(model.before(x), accum_ema_update=True)
        return torch.nn.functional.dropout(quantized).sum() + loss

    for call in (region, lambda x: checkpoint(region, x, use_reentrant=False)):
        torch.manual_seed(1)
        x = normal(30, 8).requires_grad_()
        call(x).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_graph_that_is_kept_can_be_run_again():
    model = QuantizedNet(LAYERS["averages"])
    quantized, loss = checkpoint(model, normal(30, 8).requires_grad_(), use_reentrant=False)
    total = quantized.sum() + loss
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [torch.autograd.grad(total, model.before.weight, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*gradients)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def twice(module, x):
    return sum(part.sum() for _ in range(2) for part in module(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["two regions", "one region"])
def test_equal_batches(inside, reentrant):
    """Neither shape nor sum tells the passes apart, and the codewords move between them."""
    plain = QuantizedNet(LAYERS["averages"])
    model, gradients = copy.deepcopy(plain), []

    def region(x):
        if inside:
            return checkpoint(lambda x: twice(model, x), x, use_reentrant=reentrant)
        return twice(lambda x: checkpoint(model, x, use_reentrant=reentrant), x)

    for call in (region, lambda x: twice(plain, x)):
        x = normal(30, 8).requires_grad_()
        total = call(x)
        for _ in range(2):  # the gradients of both calls add up
            total.backward(retain_graph=True)
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_batch_with_nan_and_no_backward_pass():
    """The next batch is not confused with a batch that a training loop skipped."""
    plain = QuantizedNet(LAYERS["averages"])
    model = copy.deepcopy(plain)
    broken, gradients = normal(30, 8).index_fill(0, torch.tensor([3]), torch.nan), []
    for call in (plain, lambda x: checkpoint(model, x, use_reentrant=False)):
        call(broken)
        x = normal(30, 8, seed=1).requires_grad_()
        quantized, loss = call(x)
        (quantized.square().sum() + loss).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_a_checkpoint_of_halves_ends_its_second_pass_early():
    """The end is an error of torch's own, raised inside the layer, which must not explain it."""
    layer = VectorQuantize(8, 16, learnable_codebook=True, ema_update=False)
    x = normal(2, 5, 8).bfloat16().requires_grad_()
    (plain,) = torch.autograd.grad(layer(x)[0].float().sum(), x)
    again = checkpoint(lambda rows: layer(rows)[0], x, use_reentrant=False)
    (found,) = torch.autograd.grad(again.float().sum(), x)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


def test_no_state_is_stored_without_a_checkpoint():
    model = QuantizedNet(LAYERS["averages"])
    list(run(model, lambda m, x: m(x)))
    assert len(model.quantizer._codebook.memory) == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "op",
    [
        lambda x: vq(x, normal(5, 4, seed=1)).loss,
        lambda x: vq(x, normal(5, 4, seed=1), estimator="rotation").quantized,
        lambda x: log_transition_probs(x, normal(3, 8, seed=1).log_softmax(1)),
    ],
    ids=["loss", "quantized", "log_transition_probs"],
)
def test_ops(op, reentrant):
    gradients = []
    for call in (lambda x: checkpoint(op, x, use_reentrant=reentrant), op):
        x = normal(6, 8).requires_grad_()
        call(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
