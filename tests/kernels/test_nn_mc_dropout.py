"""MCDropout cuts a model at its first dropout and runs each part as often as needed.

The tests also cover the fused head, folded passes, and models without a cut.
"""

from __future__ import annotations

import math
import operator
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from uefl_kernels import MCStats, mc_dropout_mlp
from uefl_kernels.nn import MCDropout

from .mc_dropout_models import (
    Applied,
    Branching,
    Coupled,
    FunctionalDropoutNet,
    Opaque,
    Residual,
    Transposed,
    classifier,
)


def plain(model, x, passes):
    """Run whole forward passes, all in one batch, with only the dropouts in training mode."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with torch.no_grad():
        probs = model(x.repeat(passes, *[1] * (x.dim() - 1))).softmax(-1).unflatten(0, (passes, -1))
    model.eval()
    mean = probs.mean(0)
    entropy, expected = torch.special.entr(mean).sum(-1), torch.special.entr(probs).sum(-1).mean(0)
    return MCStats(mean, entropy, expected, entropy - expected, probs.var(0, correction=0))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh])
@pytest.mark.parametrize("logit_dropout", [False, True])
def test_a_nested_head_is_fused(logit_dropout, activation):
    model, x = classifier(logit_dropout, activation), torch.randn(9, 6)
    layer = MCDropout(model, 7)
    assert layer.fused
    found = layer(x, seed=3)
    linears = [module for module in model[1] if isinstance(module, nn.Linear)]
    expected = mc_dropout_mlp(
        model[0].eval()(x),
        [linear.weight for linear in linears],
        [linear.bias for linear in linears],
        p=[0.3, 0.2, 0.1 if logit_dropout else 0.0],
        passes=7,
        activation=activation.__name__.lower(),
        input_dropout=True,
        logit_dropout=True,
        seed=3,
    )
    assert all(map(torch.equal, found, expected))


def test_agrees_with_whole_passes():
    for model in (classifier(True), FunctionalDropoutNet(), Residual()):
        x = torch.randn(5, 6)
        found = MCDropout(model, 1200)(x)
        model = model.train() if isinstance(model, FunctionalDropoutNet) else model
        if isinstance(model, FunctionalDropoutNet):
            with torch.no_grad():
                expected = model(x.repeat(1200, 1)).softmax(-1).unflatten(0, (1200, 5)).mean(0)
            torch.testing.assert_close(found.mean_probs, expected, atol=0.03, rtol=0)
            continue
        for got, want in zip(found, plain(model, x, 1200), strict=True):
            torch.testing.assert_close(got, want, atol=0.03, rtol=0)


class InPlace(nn.Module):
    """A model that writes into the values before its first dropout, at a later place."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.head, self.written = nn.Linear(6, 6), nn.Linear(6, 3), forward
        self.drop, self.drop_in_place, self.relu = nn.Dropout(0.5), nn.Dropout(0.5, True), nn.ReLU(True)

    def forward(self, x):
        return 3 * self.head(self.written(self, self.first(x)))


IN_PLACE = {
    "dropout": lambda net, h: (net.drop_in_place(h), h)[1],
    "function": lambda net, h: (F.dropout(h, 0.5, True, inplace=True), h)[1],
    "position": lambda net, h: (F.dropout(h, 0.5, True, True), h)[1],
    "torch": lambda net, h: (torch.dropout_(h, 0.5, True), h)[1],
    "view": lambda net, h: (net.drop_in_place(h.view(-1)), h)[1],
    "later view": lambda net, h: (net.drop_in_place(h), h.view(-1, 2, 3).flatten(1))[1],
    "sum": lambda net, h: (h.add_(net.drop(h.relu())), h)[1],
    "out": lambda net, h: (torch.mul(h, net.drop(h.relu()), out=h), h)[1],
    "relu": lambda net, h: net.drop(h) + net.relu(h),
    "operator": lambda net, h: net.drop(h) + operator.iadd(h, 1),
    "function of a skip": lambda net, h: net.drop(h) + F.relu(h, True),
}


@pytest.mark.filterwarnings("ignore:MCDropout. Sequential writes into a tensor")
@pytest.mark.parametrize("name", IN_PLACE)
def test_values_that_are_written_in_place(name):
    """Also with another dropout, so that the model has one in any case."""
    model, x = nn.Sequential(InPlace(IN_PLACE[name]), nn.Dropout(0.1)), torch.randn(5, 6)
    with torch.no_grad():
        found = MCDropout(model, 2000)(x)
    for got, want in zip(found, plain(model, x, 2000), strict=True):
        torch.testing.assert_close(got, want, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    "end",
    [(nn.Flatten(0, 1), nn.Linear(6, 3)), (nn.Unflatten(0, (-1, 2)), nn.Flatten(1), nn.Linear(48, 3))],
    ids=["more", "fewer"],
)
def test_rows_of_the_output_are_not_rows_of_the_input(end):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), *end), torch.randn(6, 4, 6)
    for got, want in zip(MCDropout(model, 1500)(x), plain(model, x, 1500), strict=True):
        torch.testing.assert_close(got, want, atol=0.05, rtol=0)


class Neighbors(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x, matrix):
        return self.head(matrix @ self.drop(self.first(x)))


def test_a_matrix_between_rows():
    x, matrix = torch.randn(4, 6), torch.ones(4, 4).tril()
    found = MCDropout(Neighbors(), 1500)(x, matrix)
    assert found.mean_probs.shape == (4, 3)
    with pytest.raises(ValueError, match="consistent"):
        MCDropout(Neighbors(), 5, consistent=True)(x, matrix)


@pytest.mark.parametrize("make", [classifier, FunctionalDropoutNet, Residual])
def test_the_part_before_the_first_dropout_runs_once(make):
    model = make()
    layer = MCDropout(model, 20)
    first = next(module for module in model.modules() if isinstance(module, Opaque))
    first.calls = first.rows = 0
    layer(torch.randn(11, 6))
    assert (first.calls, first.rows) == (1, 11)


@pytest.mark.parametrize(("max_rows", "rows"), [(1, 10), (35, 30), (10_000, 200)])
def test_folded_batches_are_bounded(max_rows, rows):
    """Ten rows with twenty passes run in batches of at most ``max_rows``."""
    model = FunctionalDropoutNet()
    layer, x = MCDropout(model, 20, max_rows=max_rows), torch.randn(10, 6)
    sizes = []
    model.second.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    layer(x)  # tries once whether passes can be folded
    sizes.clear()
    layer(x)
    assert sum(sizes) == 200
    assert max(sizes) == rows


def test_how_passes_are_folded_changes_no_distribution():
    model, x = FunctionalDropoutNet(), torch.randn(4, 6)
    wide, narrow = (MCDropout(model, 1500, max_rows=max_rows)(x) for max_rows in (6_000, 100))
    for got, want in zip(wide, narrow, strict=True):
        torch.testing.assert_close(got, want, atol=0.03, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "shape"),
    [  # with five rows and a sequence of five, only a trial run tells the dimensions apart
        (Transposed, (5, 5, 4)),
        (Transposed, (5, 7, 4)),
        *(
            (partial(Coupled, attention, normalized), (2, 3, 8))
            for attention in (False, True)
            for normalized in (False, True)
        ),
    ],
)
def test_passes_are_not_folded_if_rows_interact(model, shape):
    """The batch is not the first dimension, or rows see each other."""
    model, x, sizes = model(), torch.randn(shape), []
    layer = MCDropout(model, 20)
    model.mix.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    layer(x)  # tries once whether passes can be folded
    sizes.clear()
    found = layer(x)
    assert sizes == [len(x)] * 20
    assert float(found.variance.min()) > 0


def test_hooks_are_run():
    """A head with hooks on its layers is not fused: the weight of spectral_norm is made by one."""
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.utils.spectral_norm(nn.Linear(4, 3))),
        torch.randn(5, 4),
    )
    layer = MCDropout(model, 5)
    assert not layer.fused
    before = layer(x, seed=1).mean_probs
    with torch.no_grad():
        model[2].weight_orig[0] *= -1
    assert not torch.equal(layer(x, seed=1).mean_probs, before)


def test_a_forward_that_was_replaced_in_an_instance_is_run():
    """accelerate replaces it to move weights, before or after the model is cut."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)), torch.randn(5, 4)
    layer = MCDropout(model, 5)
    assert layer.fused
    model[2].forward = lambda x: x[..., :3] * 0
    assert torch.equal(layer(x).mean_probs, torch.full((5, 3), 1 / 3))
    assert not layer.fused


def test_hooks_of_the_backward_pass_are_run():
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)), []
    model[2].register_full_backward_hook(lambda module, before, after: seen.append(after))
    MCDropout(model, 5)(torch.randn(5, 4)).entropy.sum().backward()
    assert seen


@pytest.mark.parametrize("make", [classifier, FunctionalDropoutNet, Residual])
def test_modes_and_statistics_are_restored(make):
    model = make()
    model.train()
    next(model.children()).eval()
    before = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    layer = MCDropout(model, 3)
    assert [module.training for module in model.modules()] == before
    layer(torch.randn(8, 6))
    with pytest.raises(RuntimeError):
        layer(torch.randn(8, 7))
    assert [module.training for module in model.modules()] == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_batch_norm_stays_in_evaluation():
    model, x = Residual(), torch.randn(8, 6)
    alone = MCDropout(model, 1200)(x[:1])
    together = MCDropout(model, 1200)(x)
    torch.testing.assert_close(alone.mean_probs, together.mean_probs[:1], atol=0.03, rtol=0)


def test_state_dict_equals_the_state_dict_of_the_model():
    model = classifier()
    layer = MCDropout(model)
    assert set(layer.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    assert len(list(layer.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("make", [classifier, FunctionalDropoutNet])
def test_integers_of_numpy(make):
    model, x = make(), torch.randn(4, 6)
    found = MCDropout(model, np.int64(3), max_rows=np.int32(5))(x, seed=np.uint8(7))
    assert all(map(torch.equal, found, MCDropout(model, 3, max_rows=5)(x, seed=7)))


@pytest.mark.parametrize("make", [classifier, FunctionalDropoutNet])
def test_seeds(make):
    layer, x = MCDropout(make(), 4), torch.randn(6, 6)
    layer(x)
    state = torch.get_rng_state()
    first, again, other = layer(x, seed=5), layer(x, seed=5), layer(x, seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.mean_probs, again.mean_probs)
    assert not torch.equal(first.mean_probs, other.mean_probs)
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(first.mean_probs, layer(x).mean_probs)


@pytest.mark.parametrize("make", [classifier, FunctionalDropoutNet])
def test_gradients_reach_every_parameter(make):
    model = make()
    MCDropout(model, 4)(torch.randn(6, 6)).entropy.sum().backward()
    assert all(
        parameter.grad is not None and bool(parameter.grad.isfinite().all())
        for parameter in model.parameters()
    )


def test_a_model_that_cannot_be_traced_runs_as_a_whole():
    model, x = Branching(), torch.randn(4, 6)
    with pytest.warns(UserWarning, match="Branching.*traced.*whole"):
        layer = MCDropout(model, 1200)
    assert not layer.fused
    found, model = layer(x), model.train()
    with torch.no_grad():
        expected = torch.stack([model(x).softmax(-1) for _ in range(1200)]).mean(0)
    torch.testing.assert_close(found.mean_probs, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(
    "dropout",
    [
        *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
        *(torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_),
        lambda *args, **kwargs: torch.native_dropout(*args, **kwargs)[0],
    ],
)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.filterwarnings("ignore:MCDropout. Applied .*traced")
def test_dropouts_of_the_torch_namespace(dropout, train, branches):
    layer = MCDropout(Applied(lambda x: dropout(x, 0.5, train), branches), 20)
    assert float(layer(torch.randn(3, 6)).variance.detach().min()) > 0
    assert (
        float(
            MCDropout(Applied(lambda x: dropout(x, p=0.5, train=train), branches), 20)(torch.randn(3, 6))
            .variance.detach()
            .min()
        )
        > 0
    )


class Attending(nn.Module):
    """An attention of its own, with a rate that depends on the mode or not, and another dropout or none."""

    def __init__(self, constant=False, function="sdpa", dropout=0.0, branches=False) -> None:
        super().__init__()
        self.project, self.drop, self.last = nn.Linear(4, 12), nn.Dropout(dropout), nn.Linear(4, 3)
        self.constant, self.function, self.branches = constant, function, branches

    def forward(self, x):
        rate = 0.5 if self.training or self.constant else 0.0
        query, key, value = self.project(x if self.branches and x.sum() > 1e9 else x * 2).chunk(3, -1)
        if self.function == "sdpa":
            value = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        elif self.function == "mha":
            x, parameters = x.transpose(0, 1), (self.project.weight, self.project.bias, None, None, False)
            last = (self.last.weight.new_ones(4, 4).triu(), None, self.training or self.constant)
            value = F.multi_head_attention_forward(x, x, x, 4, 2, *parameters, 0.5, *last)[0].transpose(0, 1)
        else:
            value = F.dropout(value, rate)
        return self.last(self.drop(value).mean(1))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("function", ["sdpa", "mha", "dropout"])
@pytest.mark.parametrize("constant", [False, True])
def test_rates_that_depend_on_the_mode(constant, function, dropout):
    model, x = Attending(constant, function, dropout).eval(), torch.randn(1, 4, 4)
    few, layer = MCDropout(model, 20), MCDropout(model, 1000)
    with torch.no_grad():
        torch.testing.assert_close(few(x, seed=1), few(x, seed=1), rtol=0, atol=0)
        found = layer(x, seed=1)
        probs = model.train()(x.expand(4000, -1, -1)).softmax(-1)
    torch.testing.assert_close(found.mean_probs[0], probs.mean(0), atol=0.03, rtol=0)
    torch.testing.assert_close(found.variance[0], probs.var(0, correction=0), atol=0, rtol=0.2)


def test_a_rate_of_0_outside_training_is_noted():
    x = torch.randn(2, 4, 4)
    with pytest.warns(UserWarning, match="Attending.*traced"):
        layer = MCDropout(Attending(dropout=0.5, branches=True), 4)
    with pytest.warns(UserWarning, match=r"rate 0.*self\.training"):
        layer(x)
    with pytest.warns(UserWarning, match="Attending.*traced"):
        layer = MCDropout(Attending(constant=True, branches=True), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(layer(x).variance.detach().min()) > 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_dropouts_of_scripted_modules():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5))), nn.Linear(8, 3))
    assert float(MCDropout(model, 20)(torch.randn(3, 6)).variance.detach().min()) > 0


@pytest.mark.parametrize("built_in", ["attention", "lstm", "transformer"])
def test_dropouts_inside_layers_of_torch(built_in):
    class BuiltInLayerNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer: nn.Module = {
                "attention": lambda: nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True),
                "lstm": lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True),
                "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
            }[built_in]()
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            out = self.layer(x, x, x)[0] if built_in == "attention" else self.layer(x)
            return self.head((out[0] if built_in == "lstm" else out).mean(1))

    with torch.no_grad():
        stats = MCDropout(BuiltInLayerNet().eval(), 20)(torch.randn(3, 4, 8))
    assert float(stats.variance.detach().min()) > 0
    assert float(stats.mutual_info.min()) > 0


def test_torchvision_resnet_with_a_dropout_head():
    models = pytest.importorskip("torchvision.models")
    model = models.resnet18(num_classes=7)
    model.fc = nn.Sequential(nn.Dropout(0.3), model.fc)
    layer = MCDropout(model, 5)
    assert layer.fused
    with torch.no_grad():
        stats = layer(torch.randn(2, 3, 64, 64))
    assert stats.mean_probs.shape == (2, 7)
    assert float(stats.variance.detach().min()) > 0
    assert float(stats.entropy.max()) <= math.log(7) + 1e-5
