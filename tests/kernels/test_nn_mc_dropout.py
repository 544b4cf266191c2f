"""MCDropout: where it cuts, what runs how often, the fused tail, folded passes, and models that it cannot cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from uefl_kernels import MCStats, mc_dropout_mlp
from uefl_kernels.nn import MCDropout


class Counted(nn.Module):
    """Counts its calls and the rows that it has seen."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls, self.rows = inner, 0, 0

    def forward(self, x):
        self.calls, self.rows = self.calls + 1, self.rows + len(x)
        return self.inner(x)


class Opaque(Counted):
    """A leaf for the tracer, so that its calls can be counted."""


Opaque.__module__ = "torch.nn.opaque"


class Functional(nn.Module):
    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.first, self.second, self.p = Opaque(nn.Linear(6, 20)), Opaque(nn.Linear(20, 4)), p

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x).relu(), self.p, self.training))


class Residual(nn.Module):
    """A dropout in a branch, an in-place one, and batch norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = Opaque(nn.Linear(6, 8)), nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(8, 8))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.norm(x + self.branch(x)))


class Branching(nn.Module):
    """Cannot be traced: the way depends on the data."""

    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.body, self.p = nn.Linear(6, 4), 0.5 if dropout else 0.0

    def forward(self, x):
        x = x if x.sum() > 1e9 else x * 2
        return self.body(nn.functional.dropout(x, self.p, self.training) if self.p else x)


class Transposed(nn.Module):
    """The batch comes second where the dropout is, so passes must not be stacked along the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.mix = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):  # [B, S, 4]
        return self.mix(self.drop(x.transpose(0, 1)).mean(0))


class Coupled(nn.Module):
    """Rows see each other after the dropout, in ways that a batch of copies does not show."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.drop, self.mix = nn.Dropout(0.5), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2) if attention else None

    def forward(self, x):
        x = self.drop(x)
        return 4 * self.mix(x - x.mean(0) if self.attention is None else self.attention(x, x, x)[0])


def plain(model, x, passes):
    """Whole forward passes with the dropouts on, everything else in evaluation mode."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with torch.no_grad():
        probs = torch.stack([model(x).softmax(-1) for _ in range(passes)])
    model.eval()
    mean = probs.mean(0)
    entropy, expected = torch.special.entr(mean).sum(-1), torch.special.entr(probs).sum(-1).mean(0)
    return MCStats(mean, entropy, expected, entropy - expected, probs.var(0, correction=0))


def classifier(logit_dropout=False, activation=nn.GELU):
    tail = [nn.Dropout(0.3), nn.Linear(16, 12), activation(), nn.Dropout(0.2), nn.Linear(12, 5)]
    return nn.Sequential(
        nn.Sequential(Opaque(nn.Linear(6, 16)), nn.BatchNorm1d(16), nn.ReLU()),
        nn.Sequential(*tail, *([nn.Dropout(0.1)] if logit_dropout else [])),
    )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh])
@pytest.mark.parametrize("logit_dropout", [False, True])
def test_a_nested_tail_is_fused(logit_dropout, activation):
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
    for model in (classifier(True), Functional(), Residual()):
        x = torch.randn(5, 6)
        found = MCDropout(model, 1200)(x)
        model = model.train() if isinstance(model, Functional) else model
        if isinstance(model, Functional):
            with torch.no_grad():
                expected = torch.stack([model(x).softmax(-1) for _ in range(1200)]).mean(0)
            torch.testing.assert_close(found.mean_probs, expected, atol=0.03, rtol=0)
            continue
        for got, want in zip(found, plain(model, x, 1200), strict=True):
            torch.testing.assert_close(got, want, atol=0.03, rtol=0)


@pytest.mark.parametrize("make", [classifier, Functional, Residual])
def test_the_part_before_the_first_dropout_runs_once(make):
    model = make()
    layer = MCDropout(model, 20)
    first = next(module for module in model.modules() if isinstance(module, Opaque))
    first.calls = first.rows = 0
    layer(torch.randn(11, 6))
    assert (first.calls, first.rows) == (1, 11)


@pytest.mark.parametrize(("max_rows", "rows"), [(1, 10), (35, 30), (10_000, 200)])
def test_folded_batches_are_bounded(max_rows, rows):
    """Ten rows, twenty passes."""
    model = Functional()
    layer, x = MCDropout(model, 20, max_rows=max_rows), torch.randn(10, 6)
    sizes = []
    model.second.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    layer(x)  # tries once whether passes can be folded
    sizes.clear()
    layer(x)
    assert sum(sizes) == 200
    assert max(sizes) == rows


def test_how_passes_are_folded_changes_no_distribution():
    model, x = Functional(), torch.randn(4, 6)
    wide, narrow = (MCDropout(model, 1500, max_rows=max_rows)(x) for max_rows in (6_000, 100))
    for got, want in zip(wide, narrow, strict=True):
        torch.testing.assert_close(got, want, atol=0.03, rtol=0)


@pytest.mark.parametrize("sequence", [5, 7])
def test_passes_are_not_folded_where_the_batch_is_not_first(sequence):
    """Five rows: with a sequence of five, only the trial can tell."""
    model, x = Transposed(), torch.randn(5, sequence, 4)
    found = MCDropout(model, 1500)(x)
    for got, want in zip(found, plain(model, x, 1500), strict=True):
        torch.testing.assert_close(got, want, atol=0.03, rtol=0)


@pytest.mark.parametrize("attention", [False, True])
def test_passes_are_not_folded_where_rows_see_each_other(attention):
    model, x = Coupled(attention), torch.randn(2, 3, 8)
    with torch.no_grad():
        found = MCDropout(model, 1500)(x)
    for got, want in zip(found, plain(model, x, 1500), strict=True):
        torch.testing.assert_close(got, want, atol=0.04, rtol=0)


def test_hooks_are_run():
    """A tail whose layers have hooks is not fused: the weight of spectral_norm is made by one."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.utils.spectral_norm(nn.Linear(4, 3))), torch.randn(5, 4)
    layer = MCDropout(model, 5)
    assert not layer.fused
    before = layer(x, seed=1).mean_probs
    with torch.no_grad():
        model[2].weight_orig[0] *= -1
    assert not torch.equal(layer(x, seed=1).mean_probs, before)


@pytest.mark.parametrize("make", [classifier, Functional, Residual])
def test_modes_and_statistics_are_left_as_found(make):
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


def test_state_is_that_of_the_model():
    model = classifier()
    layer = MCDropout(model)
    assert set(layer.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    assert len(list(layer.parameters())) == len(list(model.parameters()))


def test_follows_the_model_to_another_dtype_and_new_weights():
    layer, x = MCDropout(classifier(), 5), torch.randn(3, 6)
    layer.double()
    assert layer(x.double()).entropy.dtype == torch.float64
    before = layer(x.double(), seed=1)
    with torch.no_grad():
        layer.model[1][1].weight.mul_(2)
        layer.model[1][0].p = 0.9
    assert not torch.equal(layer(x.double(), seed=1).mean_probs, before.mean_probs)


def test_follows_a_model_whose_modules_change():
    """A module replaced, a hook added, a dropout that begins to drop: as if it were wrapped again."""
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), torch.randn(9, 6)
    layer = MCDropout(model, 4)
    before = layer(x, seed=1)

    def follows(fused):
        nonlocal before
        found, anew = layer(x, seed=1), MCDropout(model, 4)
        assert (layer.fused, anew.fused) == (fused, fused)
        assert all(map(torch.equal, found, anew(x, seed=1)))
        assert not torch.equal(found.mean_probs, before.mean_probs)
        before = found

    model[0] = nn.Linear(6, 8)
    follows(True)
    model[4] = nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3))
    follows(True)
    model[1].p = 0.5
    follows(False)
    hook = model[4].register_forward_hook(lambda module, args, output: 2 * output)
    follows(False)
    hook.remove()
    model[1].p = model[3].p = 0.0
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^MCDropout: the model has no dropout with p > 0"):
            layer(x)


def test_consistent_masks_of_a_model_that_lost_its_chain():
    layer = MCDropout(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), 4, consistent=True)
    layer.model[1] = nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^MCDropout: consistent=True needs a model that ends in a chain"):
            layer(torch.randn(2, 6))


@pytest.mark.parametrize("make", [classifier, Functional])
def test_integers_of_numpy(make):
    model, x = make(), torch.randn(4, 6)
    found = MCDropout(model, np.int64(3), max_rows=np.int32(5))(x, seed=np.uint8(7))
    assert all(map(torch.equal, found, MCDropout(model, 3, max_rows=5)(x, seed=7)))


@pytest.mark.parametrize("make", [classifier, Functional])
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


@pytest.mark.parametrize("make", [classifier, Functional])
def test_gradients_reach_every_parameter(make):
    model = make()
    MCDropout(model, 4)(torch.randn(6, 6)).entropy.sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_consistent_masks():
    layer = MCDropout(classifier(), 6, consistent=True)
    with torch.no_grad():
        stats = layer(torch.randn(1, 6).repeat(5, 1), seed=2)
    assert float((stats.mean_probs - stats.mean_probs[0]).abs().max()) < 1e-6
    with pytest.raises(ValueError, match="consistent=True needs a model that ends in a chain"):
        MCDropout(Functional(), consistent=True)


def test_a_model_that_cannot_be_traced_runs_as_a_whole():
    model, x = Branching(), torch.randn(4, 6)
    with pytest.warns(UserWarning, match="Branching cannot be traced .*whole model runs for every pass"):
        layer = MCDropout(model, 1200)
    assert not layer.fused
    found, model = layer(x), model.train()
    with torch.no_grad():
        expected = torch.stack([model(x).softmax(-1) for _ in range(1200)]).mean(0)
    torch.testing.assert_close(found.mean_probs, expected, atol=0.03, rtol=0)


def test_models_without_dropout_get_an_error():
    for model in (nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)), Functional(p=0.0)):
        with pytest.raises(ValueError, match="the model has no dropout with p > 0; add"):
            MCDropout(model)
    with pytest.warns(UserWarning, match="cannot be traced"):
        layer = MCDropout(Branching(dropout=False))
    with pytest.raises(RuntimeError, match="the model has no dropout with p > 0"):
        layer(torch.randn(2, 6))


class OnlyInTraining(nn.Module):
    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.body, self.inner, self.branches = nn.Linear(6, 4), nn.Sequential(nn.Dropout(0.5)), branches

    def forward(self, x):
        if self.branches and x.sum() > 1e9:
            return self.body(x)
        return self.body(self.inner(x) if self.training else x)


def test_a_dropout_that_evaluation_mode_does_not_reach_is_named():
    message = r"^MCDropout: Dropout 'inner.0' is not reached in evaluation mode; call it whatever self.training is"
    with pytest.raises(ValueError, match=message):
        MCDropout(OnlyInTraining())
    with pytest.warns(UserWarning, match="cannot be traced"):
        layer = MCDropout(OnlyInTraining(branches=True))
    with pytest.raises(RuntimeError, match=message):
        layer(torch.randn(2, 6))


class Applied(nn.Module):
    """A function between two layers, traced or not."""

    def __init__(self, function, branches: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.function, self.branches = nn.Linear(6, 20), nn.Linear(20, 4), function, branches

    def forward(self, x):
        if self.branches and x.sum() > 1e9:
            return self.second(x)
        return self.second(self.function(self.first(x)))


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("dropout", [torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.filterwarnings("ignore:MCDropout. Applied cannot be traced")
def test_dropouts_of_the_torch_namespace(dropout, train, branches):
    layer = MCDropout(Applied(lambda x: dropout(x, 0.5, train), branches), 20)
    assert float(layer(torch.randn(3, 6)).variance.detach().min()) > 0
    assert float(MCDropout(Applied(lambda x: dropout(x, p=0.5, train=train), branches), 20)(torch.randn(3, 6)).variance.detach().min()) > 0


@pytest.mark.filterwarnings("ignore:MCDropout. Applied cannot be traced")
def test_functional_dropouts_that_drop_everything_are_refused():
    for function, name in ((lambda x: nn.functional.dropout(x, 1.0), "dropout"), (lambda x: torch.dropout(x, 1, True), "dropout")):
        with pytest.raises(ValueError, match=rf"^MCDropout: {name} drops everything \(p = 1\); use a rate in \[0, 1\)"):
            MCDropout(Applied(function))
        with pytest.raises(ValueError, match=rf"^MCDropout: {name} drops everything \(p = 1\); use a rate in \[0, 1\)"):
            MCDropout(Applied(function, branches=True))(torch.randn(2, 6))


def test_attention_with_a_rate_of_its_own_is_named():
    def attend(x):
        heads = x.reshape(-1, 1, 5, 4)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).flatten(1)

    with pytest.raises(ValueError, match=r"add nn.Dropout \(dropout_p of F.scaled_dot_product_attention is not switched on\), or use"):
        MCDropout(Applied(attend))


@pytest.mark.parametrize("make", [classifier, Functional, Branching])
@pytest.mark.filterwarnings("ignore:MCDropout. Branching cannot be traced")
def test_seeds_and_passes_are_checked_in_every_call(make):
    layer, x = MCDropout(make(), 3), torch.randn(2, 6)
    for seed in (-1, 1.5, 2**63, "a", True):
        with pytest.raises(ValueError, match=rf"^MCDropout: seed must be an integer in \[0, 2\^63\) or None, got {seed!r}"):
            layer(x, seed=seed)
    for passes in (0, 2.5, True):
        layer.passes = passes
        with pytest.raises(ValueError, match=f"^MCDropout: passes must be an integer of at least 1, got {passes}"):
            layer(x)


@pytest.mark.parametrize("built_in", ["attention", "lstm", "transformer"])
def test_dropouts_inside_layers_of_torch(built_in):
    class Model(nn.Module):
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
        stats = MCDropout(Model().eval(), 20)(torch.randn(3, 4, 8))
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MCDropout(torch.relu), TypeError, "model must be a torch.nn.Module, got builtin_function_or_method"),
        (lambda: MCDropout(classifier(), 0), ValueError, "passes must be an integer of at least 1, got 0"),
        (lambda: MCDropout(classifier())(np.zeros((2, 6))), TypeError, "takes tensors, got a NumPy array; give torch.from_numpy"),
        (lambda: MCDropout(classifier(), max_rows=0), ValueError, "max_rows must be an integer of at least 1, got 0"),
        (lambda: MCDropout(nn.Sequential(nn.Dropout(1.0), nn.Linear(2, 2))), ValueError, r"Dropout drops everything \(p = 1\)"),
        (lambda: MCDropout(nn.Sequential(nn.Dropout(0.5)))(torch.randn(3)), TypeError, r"must return logits \[B, ..., C\], got \[3\]"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=f"MCDropout: .*{message}"):
        call()
