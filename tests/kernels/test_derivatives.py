"""Ops take some derivatives and transforms, and refuse the others by name.

No result silently lacks a gradient.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

from uefl_kernels import (
    kmeans,
    kmeans_step,
    log_transition_probs,
    mc_dropout_mlp,
    rvq,
    set_proportion_loss,
    transition_double_softmax,
    transition_nll,
    vq,
    vq_assign,
)
from uefl_kernels.nn import MCDropout, ResidualVQ, SimVQ, VectorQuantize

from .conftest import normal

CODES, WEIGHTS = normal(4, 8, seed=1), [normal(5, 8, seed=2), normal(3, 5, seed=3)]
MATRIX, TARGETS = (
    torch.rand(3, 8, generator=torch.Generator().manual_seed(0)).log(),
    torch.tensor([0, 1, 2, 0, 1, 2]),
)
OFFSETS, SHARES = torch.tensor([0, 3, 6]), torch.full((2, 8), 1 / 8)
HEAD = MCDropout(torch.nn.Sequential(torch.nn.Linear(8, 3)), insert=0.1)
DIFFERENTIABLE = {  # by op, a function of its first argument
    "vq": lambda x: vq(x, CODES).loss,
    "rvq": lambda x: rvq(x, CODES.expand(2, 4, 8)).losses.sum(),
    "mc_dropout_mlp": lambda x: mc_dropout_mlp(x, WEIGHTS, p=0.3, seed=1, input_dropout=True).entropy.sum(),
    "transition_nll": lambda x: transition_nll(x, TARGETS, MATRIX).sum(),
    "log_transition_probs": lambda x: log_transition_probs(x, MATRIX).exp().sum(),
    "transition_double_softmax": lambda x: transition_double_softmax(x, TARGETS, MATRIX).sum(),
    "set_proportion_loss": lambda x: set_proportion_loss(x, OFFSETS, SHARES).sum(),
}
LAYERS = {
    "VectorQuantize": ("vq", lambda x: VectorQuantize(8, 4)(x)[2]),
    "ResidualVQ": ("rvq", lambda x: ResidualVQ(dim=8, codebook_size=4, num_quantizers=2)(x)[2].sum()),
    "SimVQ": ("vq", lambda x: SimVQ(8, 4)(x)[2]),
    "MCDropout": ("mc_dropout_mlp", lambda x: HEAD(x, seed=1).entropy.sum()),
}
ALL = {name: (name, call) for name, call in DIFFERENTIABLE.items()} | LAYERS
CONSTANT = {
    "vq_assign": lambda x: vq_assign(x, CODES),
    "kmeans": lambda x: kmeans(x, 2).centers,
    "kmeans_step": lambda x: kmeans_step(x, CODES).centers,
}
X = normal(6, 8)


@pytest.mark.parametrize("name", ALL)
def test_a_second_derivative_is_refused(name):
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(ALL[name][1](x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^\w+:.*create_graph=True"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("name", ALL)
def test_forward_mode_is_refused(name):
    op, call = ALL[name]
    message = f"^({op}|{name}):.*forward-mode.*PyTorch"
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        call(forward_ad.make_dual(X, X))
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(call, (X,), (X,))


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {"topk": 2}),
        ({"stochastic_sample_codes": True}, {}),
        ({"straight_through": True, "rotation_trick": False}, {}),
        ({"num_quantizers": 2, "beam_size": 2}, {}),
    ],
    ids=["topk", "drawn", "soft", "beams"],
)
@pytest.mark.parametrize("training", [True, False])
def test_forward_mode_of_other_searches_is_refused(options, call, training):
    """Codewords would be constants there, because the input requires no gradient."""
    kind = ResidualVQ if "beam_size" in options else VectorQuantize
    layer = kind(dim=8, codebook_size=4, **options).train(training)
    with pytest.raises(RuntimeError, match=rf"^{kind.__name__}:.*forward-mode"):
        torch.func.jvp(lambda x: layer(x, freeze_codebook=True, **call)[0], (X,), (X,))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functional_gradients_are_refused(name, transform):
    op, call = ALL[name]
    with pytest.raises(RuntimeError, match=rf"^({op}|{name}): torch\.func\.grad"):
        transform(call)(X)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *CONSTANT])
def test_vmap_is_a_call_for_each_element(name):
    batch, call = normal(3, 6, 8, seed=5), (DIFFERENTIABLE | CONSTANT)[name]
    torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([call(x) for x in batch]))


@pytest.mark.parametrize("name", ["vq", "rvq", "mc_dropout_mlp"])
def test_backward_pass_of_vmap(name):
    """``vmap`` hides that its input requires a gradient."""
    gradients = []
    for mapped in (True, False):
        batch, call = normal(3, 6, 8, seed=5).requires_grad_(), DIFFERENTIABLE[name]
        found = torch.func.vmap(call)(batch) if mapped else torch.stack([call(x) for x in batch])
        found.sum().backward()
        gradients.append(batch.grad)
    torch.testing.assert_close(*gradients)


def test_codewords_have_their_gradient_behind_vmap():
    gradients = []
    for mapped in (True, False):
        batch, codebooks = normal(3, 6, 8), normal(3, 4, 8, seed=1).requires_grad_()
        pairs = zip(batch, codebooks, strict=True)
        found = (
            torch.func.vmap(lambda x, codebook: vq(x, codebook).loss)(batch, codebooks)
            if mapped
            else torch.stack([vq(x, codebook).loss for x, codebook in pairs])
        )
        found.sum().backward()
        gradients.append(codebooks.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(4, 8), (4, 4), (2, 4, 4)], ids=["whole", "shared", "own"])
@pytest.mark.parametrize("options", [{}, {"estimator": "rotation"}, {"codebook_weight": 0.0}])
def test_batch_with_codebooks_is_one_search(monkeypatch, shape, options):
    """GPUs use this way.

    Elements of the batch have different weights in the result.
    """
    package = importlib.import_module("uefl_kernels.ops.vq")
    monkeypatch.setattr(package, "_JOINED_ON", ("cpu",))
    weights, found = torch.tensor([1.0, -2.0, 0.5]), []
    for mapped in (True, False):
        batch, codebooks = (
            normal(3, *size, seed=i).requires_grad_() for i, size in enumerate([(6, 8), shape])
        )

        def call(x, codebook):
            return tuple(vq(x, codebook, **options))

        pairs = [call(x, codebook) for x, codebook in zip(batch, codebooks, strict=True)]
        outputs = (
            torch.func.vmap(call)(batch, codebooks)
            if mapped
            else [*map(torch.stack, zip(*pairs, strict=True))]
        )
        loss = (weights * (outputs[2] + outputs[0].square().sum((1, 2)))).sum()
        found.append((*outputs, *torch.autograd.grad(loss, (batch, codebooks))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("error")
def test_vmap_of_vq_gives_no_warning():
    torch.func.vmap(lambda x, codebook: vq(x, codebook).loss)(normal(3, 6, 8), normal(3, 4, 8, seed=1))


@pytest.mark.parametrize(
    "name", ["transition_nll", "log_transition_probs", "transition_double_softmax", "set_proportion_loss"]
)
def test_losses_refuse_a_gradient_that_vmap_would_lose(name):
    batch = normal(3, 6, 8).requires_grad_()
    with pytest.raises(RuntimeError, match=r"^\w+: .*vmap"):
        torch.func.vmap(DIFFERENTIABLE[name])(batch)
    with torch.no_grad():
        assert torch.func.vmap(DIFFERENTIABLE[name])(batch).isfinite().all()


@pytest.mark.parametrize(
    "make",
    [lambda: VectorQuantize(8, 4), lambda: ResidualVQ(dim=8, codebook_size=4, num_quantizers=2)],
    ids=["one", "residual"],
)
def test_vmap_of_a_layer_in_evaluation(make):
    layer, batch = make().eval(), normal(3, 6, 8)
    found = torch.func.vmap(lambda x: layer(x)[:2])(batch)
    for got, want in zip(found, layer(batch), strict=False):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="vmap"):  # in training it would update its codewords
        torch.func.vmap(lambda x: layer.train()(x)[0])(batch)


@pytest.mark.parametrize("name", CONSTANT)
def test_results_without_gradient_stop_it(name):
    assert not CONSTANT[name](X.clone().requires_grad_()).requires_grad


def test_departures_are_documented():
    text = (Path(__file__).parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")
    departures = text[text.index("## Refused options") :]
    for what in ("second derivative", "forward mode", "torch.func.grad", "torch.func.vmap"):
        assert what in departures
