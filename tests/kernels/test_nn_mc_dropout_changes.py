"""MCDropout: models that change after they were traced, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from uefl_kernels.nn import MCDropout

from .mc_dropout_models import Applied, Branching, FunctionalDropoutNet, OnlyInTraining, ScaledNet, classifier


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


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
    """A replaced module, a new hook or a changed rate has the effect of wrapping the model again."""
    model, x = (
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)),
        torch.randn(9, 6),
    )
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
        with pytest.raises(ValueError, match=r"^MCDropout: .*p > 0"):
            layer(x)


def replace_scale(model):
    model.scale = nn.Parameter(torch.full((1, 4), 50.0))


def replace_weight_of_a_layer(model):
    model.first.weight = nn.Parameter(torch.randn(4, 6))


def replace_buffer(model):
    model.shift = torch.ones(1, 4)


def write_into_buffer(model):
    model.shift.fill_(1.0)


def load_other_tensors(model):
    model.load_state_dict(
        {name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=True
    )


CHANGES = [replace_scale, replace_weight_of_a_layer, replace_buffer, write_into_buffer, load_other_tensors]


@pytest.mark.parametrize("change", CHANGES)
def test_follows_tensors_that_the_models_own_forward_reads(change):
    model, x = ScaledNet(), torch.randn(2, 6)
    layer = MCDropout(model, 5)
    before = layer(x, seed=1)
    change(model)
    found = layer(x, seed=1)
    assert all(map(torch.equal, found, MCDropout(model, 5)(x, seed=1)))
    assert not torch.equal(found.mean_probs, before.mean_probs)
    assert not [name for name in vars(model) if name.startswith("_tensor_constant")]


def test_functional_call_uses_other_tensors_for_one_call():
    layer, x, scale = (
        MCDropout(ScaledNet(), 5),
        torch.randn(2, 6),
        torch.full((1, 4), 9.0, requires_grad=True),
    )
    before = layer(x, seed=1)
    found = torch.func.functional_call(layer, {"model.scale": scale}, (x,), {"seed": 1})
    assert all(map(torch.equal, layer(x, seed=1), before))
    found.entropy.sum().backward()
    assert scale.grad is not None
    assert layer.model.scale.grad is None
    replace_scale(layer.model)
    layer.model.scale.data.fill_(9.0)
    assert all(map(torch.equal, layer(x, seed=1), found))


def test_a_model_that_stays_is_traced_once(monkeypatch):
    layer, x = MCDropout(ScaledNet(), 2), torch.randn(2, 6)
    monkeypatch.setattr(layer, "_trace", lambda: pytest.fail("traced anew"))
    layer(x)
    layer.model.load_state_dict(ScaledNet().state_dict())
    layer(x)


def test_models_without_dropout_get_an_error():
    for model in (
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)),
        FunctionalDropoutNet(p=0.0),
    ):
        with pytest.raises(ValueError, match=r"p > 0.*nn\.Dropout"):
            MCDropout(model)
    with pytest.warns(UserWarning, match="Branching"):
        layer = MCDropout(Branching(dropout=False))
    with pytest.raises(RuntimeError, match="p > 0"):
        layer(torch.randn(2, 6))


def test_a_dropout_that_evaluation_mode_does_not_reach_is_named():
    message = r"^MCDropout: Dropout 'inner\.0'.*self\.training"
    with pytest.raises(ValueError, match=message):
        MCDropout(OnlyInTraining())
    with pytest.warns(UserWarning, match="OnlyInTraining"):
        layer = MCDropout(OnlyInTraining(branches=True))
    with pytest.raises(RuntimeError, match=message):
        layer(torch.randn(2, 6))


@pytest.mark.filterwarnings("ignore:MCDropout. Applied .*traced")
def test_functional_dropouts_that_drop_everything_are_refused():
    for function, name in (
        (lambda x: nn.functional.dropout(x, 1.0), "dropout"),
        (lambda x: torch.dropout(x, 1, True), "dropout"),
    ):
        with pytest.raises(ValueError, match=rf"^MCDropout: {name}.*\(p = 1\).*\[0, 1\)"):
            MCDropout(Applied(function))
        with pytest.raises(ValueError, match=rf"^MCDropout: {name}.*\(p = 1\).*\[0, 1\)"):
            MCDropout(Applied(function, branches=True))(torch.randn(2, 6))


@pytest.mark.parametrize("make", [classifier, FunctionalDropoutNet, Branching])
@pytest.mark.filterwarnings("ignore:MCDropout. Branching .*traced")
def test_seeds_and_passes_are_checked_in_every_call(make):
    layer, x = MCDropout(make(), 3), torch.randn(2, 6)
    for seed in (-1, 1.5, 2**63, "a", True):
        with pytest.raises(ValueError, match=rf"^MCDropout: seed.*\[0, 2\^63\).*None.*{seed!r}"):
            layer(x, seed=seed)
    for passes in (0, 2.5, True):
        layer.passes = passes
        with pytest.raises(ValueError, match=f"^MCDropout: passes.*{passes}"):
            layer(x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MCDropout(torch.relu), TypeError, r"model.*torch\.nn\.Module.*builtin_function_or_method"),
        (lambda: MCDropout(classifier(), 0), ValueError, "passes.*got 0"),
        (lambda: MCDropout(classifier())(np.zeros((2, 6))), TypeError, r"NumPy.*torch\.from_numpy"),
        (lambda: MCDropout(classifier(), max_rows=0), ValueError, "max_rows.*got 0"),
        (lambda: MCDropout(classifier(), consistent="no"), ValueError, "consistent.*got 'no'"),
        (
            lambda: MCDropout(torch.export.export(classifier(), (torch.randn(2, 6),)).module()),
            TypeError,
            r"model.*torch\.export",
        ),
        (
            lambda: MCDropout(nn.Sequential(nn.Dropout(1.0), nn.Linear(2, 2))),
            ValueError,
            r"Dropout .*\(p = 1\)",
        ),
        (
            lambda: MCDropout(nn.Sequential(nn.Dropout(0.5)))(torch.randn(3)),
            TypeError,
            r"logits \[B, ..., C\].*\[3\]",
        ),
        (lambda: MCDropout(nn.Sequential(nn.Dropout(0.5)))(torch.randn(3, 1)), ValueError, r"\[3, 1\]"),
        (
            lambda: MCDropout(nn.LSTM(6, 8, 2, dropout=0.3))(torch.randn(2, 5, 6)),
            TypeError,
            "logits, .*tuple.*module",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=f"MCDropout: .*{message}"):
        call()


class Storing(nn.Module):
    """A model that stores what it computes, as attention maps and counts of calls."""

    def __init__(self, store):
        super().__init__()
        self.drop, self.head, self.store = nn.Dropout(0.5), nn.Linear(6, 3), store
        self.hidden, self.all = None, []
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.store(self, x)
        return self.head(self.drop(x))


@pytest.mark.parametrize(
    "store",
    [
        lambda model, x: setattr(model, "hidden", x * 2),
        lambda model, x: model.all.append(x * 2),
        lambda model, x: setattr(model, "calls", model.calls + x.mean()),
    ],
    ids=["attribute", "list", "buffer"],
)
def test_models_that_store_what_they_compute(store):
    model, x = Storing(store), torch.randn(4, 6)
    with pytest.warns(UserWarning, match="MCDropout: .*tensors"):
        layer = MCDropout(model, passes=3)
    assert [model.hidden, model.all, model.calls.item()] == [None, [], 0.0]
    found = layer(x, seed=1)
    assert all(isinstance(value, (torch.Tensor, type(None))) for value in [model.hidden, *model.all])
    torch.manual_seed(1)
    passes = [model.head(nn.functional.dropout(x, 0.5)).softmax(-1) for _ in range(3)]
    torch.testing.assert_close(found.mean_probs, torch.stack(passes).mean(0))


def test_an_error_without_words_in_a_trace():
    class Checking(Storing):
        def forward(self, x):
            if not isinstance(x, torch.Tensor):
                raise TypeError
            return super().forward(x)

    with pytest.warns(UserWarning, match="TypeError"):
        layer = MCDropout(Checking(lambda model, x: None), passes=3)
    assert layer(torch.randn(4, 6)).mean_probs.shape == (4, 3)
