"""Layers in graphs whose sizes are open, under torch.fx, and MCDropout in torch.export."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from uefl_kernels.nn import (
    FSP,
    GroupedResidualLFQ,
    GroupedResidualVQ,
    HierarchicalVQ,
    LatentQuantize,
    MCDropout,
    ResidualFSQ,
    ResidualLFQ,
    ResidualSimVQ,
    ResidualVQ,
    SimVQ,
    VectorQuantize,
)

from .conftest import normal

LAYERS = {
    "beams": lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=16, beam_size=2),
    "implicit": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, implicit_neural_codebook=True),
    "residual fsq": lambda: ResidualFSQ(levels=[5, 3], dim=8, num_quantizers=3),
    "residual lfq": lambda: ResidualLFQ(dim=8, codebook_size=16, num_quantizers=3),
    "grouped lfq": lambda: GroupedResidualLFQ(dim=8, codebook_size=16, num_quantizers=3, groups=2),
    "fsp": lambda: FSP([5, 4], dim=8),
}
TRAINED = {
    "revival": lambda: VectorQuantize(8, 16, threshold_ema_dead_code=2),
    "diversity": lambda: VectorQuantize(8, 16, codebook_diversity_loss_weight=1.0),
    "beams": LAYERS["beams"],
    "active codewords": lambda: VectorQuantize(
        8, 40, orthogonal_reg_weight=1.0, orthogonal_reg_active_codes_only=True, orthogonal_reg_max_codes=9
    ),
}


def layer(make):
    torch.manual_seed(0)
    model = make()
    model(normal(2, 40, 8, seed=1))
    return model.eval()


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_exported_for_any_batch_and_length(name):
    model, x = layer(LAYERS[name]), normal(2, 40, 8)
    argument = next(iter(inspect.signature(model.forward).parameters))
    sizes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)}
    program = torch.export.export(model, (x,), dynamic_shapes={argument: sizes}).module()
    for shape in ((2, 40, 8), (3, 7, 8)):
        same(program(normal(*shape, seed=5))[:3], model(normal(*shape, seed=5))[:3])


class FirstResults(nn.Module):
    """The first results of a layer that also returns a dict."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[:3]


TRACED = {
    **LAYERS,
    "fsp": lambda: FirstResults(LAYERS["fsp"]()),
    "plain": lambda: VectorQuantize(8, 16),
    "residual": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16),
    "learned": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, learnable_codebook=True),
    "shared": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, shared_codebook=True),
    "groups": lambda: GroupedResidualVQ(dim=8, groups=2, num_quantizers=2, codebook_size=16),
    "sim": lambda: SimVQ(8, 16),
    "residual sim": lambda: ResidualSimVQ(dim=8, num_quantizers=2, codebook_size=16),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_runs_other_batches(name):
    """By default, the trace is compared with one that is made without gradients."""
    model = layer(TRACED[name])
    trace = torch.jit.trace(model, (normal(2, 40, 8),))
    for shape in ((3, 40, 8), (3, 7, 8)):
        same(trace(normal(*shape, seed=5)), model(normal(*shape, seed=5)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"stochastic_sample_codes": True},
        {"orthogonal_reg_weight": 1.0, "threshold_ema_dead_code": 2},
        {"directional_reparam": True, "threshold_ema_dead_code": 2},
    ],
    ids=["drawn", "orthogonal", "directional"],
)
def test_a_trace_in_training_is_the_layer(options):
    torch.manual_seed(0)
    model = VectorQuantize(8, 16, **options)
    traced = copy.deepcopy(model)
    torch.manual_seed(5)
    run = torch.jit.trace(traced, normal(2, 40, 8), check_trace=False)
    torch.manual_seed(5)
    model(normal(2, 40, 8))
    for step in range(2):
        found = []
        for call in (run, model):
            torch.manual_seed(step)
            found.append(call(normal(2, 40, 8, seed=step)))
        same(*found)
    assert torch.equal(traced.codebook, model.codebook)


@pytest.mark.parametrize("name", TRAINED)
def test_training_compiles_two_graphs_for_all_sizes(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, graphs = TRAINED[name](), []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    run, other = torch.compile(model, backend=backend, fullgraph=True), copy.deepcopy(model)
    for step, rows in enumerate((40, 41, 42, 60)):
        found = []
        for call in (run, other):
            torch.manual_seed(step)
            found.append(call(normal(2, rows, 8, seed=step)))
        same(*found)
    assert len(graphs) <= 2  # one graph for the first size, and one for all others


@pytest.mark.parametrize(
    "make",
    [
        *LAYERS.values(),
        lambda: VectorQuantize(8, 16),
        lambda: ResidualSimVQ(dim=8, num_quantizers=2, codebook_size=16),
        lambda: HierarchicalVQ(dim=8, codebook_size=16, scales=(1, 5)),
        lambda: LatentQuantize([5, 4], 8),
    ],
)
def test_torch_fx_is_told_to_take_the_layer_as_a_leaf(make):
    model = make().eval()
    for traced in (model, nn.Sequential(nn.Linear(8, 8), model)):
        with pytest.raises(TypeError, match=rf"^{type(model).__name__}: .*Proxy.*is_leaf_module"):
            torch.fx.symbolic_trace(traced)


class QuantizedClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.vq, self.head = VectorQuantize(8, 16), nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x):
        return self.head(self.vq(x)[0])


@pytest.mark.filterwarnings("error")
def test_a_quantizer_before_the_dropout_runs_once():
    model, calls = QuantizedClassifier(), []
    model.vq.register_forward_hook(lambda *_: calls.append(1))
    mc = MCDropout(model, 5)
    assert mc.fused
    mc(normal(6, 8))
    assert calls == [1]


def folded():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 1)), nn.Conv2d(2, 4, 1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3)
    )


def test_passes_of_a_folded_model_are_exported():
    model, x = MCDropout(folded(), 5), normal(6, 8)
    program = torch.export.export(model, (x,)).module()
    first, second = program(x), program(x)
    assert first.mean_probs.shape == (6, 3)
    assert not torch.equal(first.mean_probs, second.mean_probs)  # other masks
    with pytest.raises(RuntimeError, match="seed"):
        torch.export.export(model, (x,), {"seed": 3})


def test_consistent_passes_are_tried_before_they_are_exported():
    model, x = MCDropout(folded(), 5, consistent=True), normal(6, 8)
    with pytest.raises(RuntimeError, match=r"^MCDropout: consistent=True.*torch\.export"):
        torch.export.export(model, (x,))
    model(x)
    assert torch.export.export(model, (x,)).module()(x).mean_probs.shape == (6, 3)


@pytest.mark.parametrize("seed", [None, 3])
def test_passes_on_the_meta_device_have_shapes(seed):
    model = MCDropout(folded(), 5).to("meta")
    assert model(torch.empty(6, 8, device="meta"), seed=seed).entropy.shape == (6,)
