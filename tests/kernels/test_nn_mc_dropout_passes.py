"""MCDropout: results of every pass, one mask for a whole batch, inserted dropouts, many classes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from uefl_kernels import backend
from uefl_kernels.nn import MCDropout
from uefl_kernels.ops.mc_dropout_mlp import composed

from .mc_dropout_models import Branching, Coupled, FunctionalDropoutNet, Residual, Transposed, classifier

pytestmark = pytest.mark.filterwarnings("ignore:MCDropout. .*traced")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Recurrent(nn.Module):
    """The dropout is inside an op that vmap does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 8, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x.unsqueeze(1))[0].mean(1))


class Attentive(nn.Module):
    """The heads are folded into the batch at the dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = (
            nn.TransformerEncoderLayer(6, 2, 16, dropout=0.3, batch_first=True),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        return self.head(self.layer(torch.stack([x, x.flip(1)], 1)).mean(1))


class Reshaped(nn.Module):
    """The part after the dropout takes the number of rows, which is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5, inplace=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(x * 1).view(x.size(0), 2, 3).reshape(x.size(0), 6)).softmax(-1).log()


class Sequence(nn.Module):
    """Dropouts in the layout [S, B, 4] in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.widen = Transposed(), nn.Linear(6, 20)

    def forward(self, x):
        return self.inner(self.widen(x).view(len(x), 5, 4))


ANY = [classifier, FunctionalDropoutNet, Residual, Branching, Recurrent, Attentive, Reshaped, Sequence]


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("make", ANY)
def test_each_pass_on_request(make, consistent):
    layer, x = MCDropout(make(), 7, consistent=consistent, max_rows=9), torch.randn(4, 6)
    probs, stats = layer.probs(x, seed=3), layer(x, seed=3)
    assert probs.shape == (7, *stats.mean_probs.shape)
    torch.testing.assert_close(probs.mean(0), stats.mean_probs)
    torch.testing.assert_close(probs.var(0, correction=0), stats.variance)
    torch.testing.assert_close(torch.special.entr(probs).sum(-1).mean(0), stats.expected_entropy)
    assert len(torch.unique(probs[:, 0, 0])) > 1


@pytest.mark.parametrize("forced", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_passes_of_a_chain_equal_the_definition(dtype, forced):
    model = classifier(True).eval().to(dtype)
    x, (_, first, _, _, second, _) = torch.randn(2, 4, 6, dtype=dtype), model[1]
    model[0][1] = nn.Identity()
    with backend(forced):
        found = MCDropout(model, 5).probs(x, seed=8)
    parameters = torch.cat(
        [piece.flatten().double() for linear in (first, second) for piece in (linear.weight, linear.bias)]
    )
    rows = model[0](x).reshape(8, 16).double()
    given = composed.Arguments(
        rows, parameters, [16, 12, 5], [0.3, 0.2, 0.1], 5, "gelu", False, torch.tensor(8)
    )
    expected = composed.probs_of_passes(given, torch.ops.uefl_reference.dropout_mask)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), torch.stack([*expected]).reshape(5, 2, 4, 5), rtol=1e-5, atol=1e-6
    )


@torch.no_grad()
@pytest.mark.parametrize("make", [classifier, FunctionalDropoutNet])
def test_passes_under_autocast_match_the_statistics(make):
    layer, x = MCDropout(make(), 5), torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        probs, found = layer.probs(x, seed=8), layer(x, seed=8)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.mean(0), found.mean_probs, rtol=1e-5, atol=1e-6)


def test_gradients_of_passes():
    for make in (classifier, FunctionalDropoutNet):
        model = make()
        MCDropout(model, 4, consistent=True).probs(torch.randn(6, 6)).square().sum().backward()
        assert all(
            parameter.grad is not None and bool(parameter.grad.isfinite().all())
            for parameter in model.parameters()
        )


# --- one mask for the whole batch -------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("make", ANY)
def test_a_consistent_pass_is_one_network(make):
    """Equal rows have equal results in every pass, and each row has the results of a batch of its own."""
    layer, x = MCDropout(make(), 6, consistent=True), torch.randn(3, 6)
    together = layer.probs(torch.cat([x, x[:1]]), seed=2)
    torch.testing.assert_close(together[:, 3], together[:, 0])
    assert float(together.std(0).min()) > 1e-4
    for i in range(3):
        torch.testing.assert_close(layer.probs(x[i : i + 1], seed=2)[:, 0], together[:, i])


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("make", ANY)
def test_no_rows(make, consistent):
    layer, x = MCDropout(make(), 4, consistent=consistent), torch.randn(0, 6)
    assert (
        layer(x).mean_probs.shape == layer.probs(x)[0].shape == (0, layer.probs(torch.randn(1, 6)).shape[-1])
    )


@torch.no_grad()
def test_consistent_passes_have_the_distribution_of_others():
    model, x = Residual(), torch.randn(2, 6)
    one, other = (MCDropout(model, 1500, consistent=consistent)(x) for consistent in (True, False))
    torch.testing.assert_close(one.mean_probs, other.mean_probs, atol=0.03, rtol=0)
    torch.testing.assert_close(one.variance, other.variance, atol=0.02, rtol=0)


def test_consistent_passes_run_the_prefix_once():
    model = FunctionalDropoutNet()
    layer, x = MCDropout(model, 20, consistent=True), torch.randn(5, 6)
    layer(x)
    model.first.calls = 0
    layer(x)
    assert model.first.calls == 1


def test_rows_that_see_each_other_have_no_mask_of_one_network():
    for attention in (False, True):
        with pytest.raises(ValueError, match=r"^MCDropout: consistent=True.*rows"):
            MCDropout(Coupled(attention), 3, consistent=True)(torch.randn(4, 3, 8))


def test_a_chain_that_is_lost_stays_consistent():
    layer, x = (
        MCDropout(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), 4, consistent=True),
        torch.randn(1, 6).repeat(3, 1),
    )
    layer.model[1] = nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3))
    probs = layer.probs(x)
    assert not layer.fused
    torch.testing.assert_close(probs, probs[:, :1].expand_as(probs))


# --- dropouts put into a model ----------------------------------------------------------------------------


def plain(branches=False):
    class DropoutFreeNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(6, 16), nn.GELU()), nn.Linear(16, 3)

        def forward(self, x):
            if branches and x.sum() > 1e9:
                return x
            return self.head(self.body(x))

    return DropoutFreeNet()


@torch.no_grad()
def test_a_dropout_before_the_last_linear():
    model, x = plain(), torch.randn(5, 6)
    with pytest.raises(ValueError, match=r"p > 0.*nn\.Dropout.*insert=0\.1"):
        MCDropout(model)
    layer = MCDropout(model, 6, insert=0.4)
    expected = MCDropout(nn.Sequential(model.body, nn.Dropout(0.4), model.head), 6)
    assert layer.fused
    assert all(map(torch.equal, layer(x, seed=1), expected(x, seed=1)))
    assert [name for name, _ in model.named_modules()] == ["", "body", "body.0", "body.1", "head"]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(x), model.head(model.body(x)))


@torch.no_grad()
@pytest.mark.parametrize(
    ("insert", "branches"),
    [
        (0.4, False),
        ({"head": 0.4}, True),
        ({"body": 0.2, "head": 0.4}, False),
        ({"body.0": 0.3, "body.1": 0.2}, False),
        ({"body.0": 0.3, "body.1": 0.2}, True),
    ],
    ids=str,
)
def test_dropouts_where_they_are_named(insert, branches):
    model, x = plain(branches), torch.randn(5, 6)
    rates = insert if isinstance(insert, dict) else {"head": insert}
    drop = {name: nn.Dropout(rates.get(name, 0.0)) for name in ("body", "body.0", "body.1", "head")}
    whole = nn.Sequential(
        drop["body"], drop["body.0"], model.body[0], drop["body.1"], model.body[1], drop["head"], model.head
    ).train()
    found = MCDropout(model, 1200, insert=insert)(x)
    expected = whole(x.repeat(1200, 1)).softmax(-1).unflatten(0, (1200, 5))
    torch.testing.assert_close(found.mean_probs, expected.mean(0), atol=0.03, rtol=0)
    torch.testing.assert_close(found.variance, expected.var(0), atol=0.02, rtol=0)
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_inserted_dropouts_follow_the_model_and_are_consistent():
    for branches in (False, True):
        model, x = plain(branches), torch.randn(1, 6).repeat(4, 1)
        layer = MCDropout(model, 5, insert=0.5, consistent=True)
        before = layer.probs(x, seed=1)
        torch.testing.assert_close(before, before[:, :1].expand_as(before))
        model.head = nn.Linear(16, 3)
        assert not torch.equal(layer.probs(x, seed=1), before)


def test_torchvision_without_a_dropout():
    models = pytest.importorskip("torchvision.models")
    layer = MCDropout(models.resnet18(num_classes=7), 5, insert=0.3)
    assert layer.fused
    with torch.no_grad():
        assert float(layer(torch.randn(2, 3, 64, 64)).variance.min()) > 0


class Attention(nn.Module):
    """Its last linear layer is never called: attention uses its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2)

    def forward(self, x):
        return self.layer(x, x, x)[0]


INSERTIONS = {
    "no linear": (nn.Conv1d(2, 2, 1), 0.1, ValueError, r"nn\.Linear.*insert={name: rate}"),
    "no module": (plain(), {"heads": 0.1}, ValueError, "insert.*'heads'.*body, body"),
    "rate 1": (plain(), 1.0, ValueError, r"insert.*\(0, 1\).*{name: rate}.*got 1\.0"),
    "rate 0": (plain(), {"head": 0}, ValueError, "got 0"),
    "flag": (plain(), True, ValueError, "got True"),
    "never called": (Attention(), 0.1, ValueError, r"NonDynamicallyQuantizableLinear 'layer\.out_proj'"),
}


@pytest.mark.parametrize("case", INSERTIONS)
def test_insertions_that_are_refused(case):
    model, insert, error, message = INSERTIONS[case]
    with pytest.raises(error, match=f"^MCDropout: .*{message}"):
        MCDropout(model, insert=insert)


def test_insertions_that_a_call_refuses():
    model = plain(branches=True)
    model.other = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"^MCDropout: .*Linear 'other'"):
        MCDropout(model, insert=0.1)(torch.randn(2, 6))
    words = nn.Sequential(nn.Embedding(5, 6), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(TypeError, match=r"^MCDropout: .*torch\.int64"):
        MCDropout(words, insert={"0": 0.1})(torch.zeros(3, 1, dtype=torch.int64))


def test_dropouts_of_functions_are_fused():
    class FusedFunctionNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.second(nn.functional.dropout(self.first(x).relu(), 0.3, self.training))

    model, x = FusedFunctionNet(), torch.randn(5, 6)
    assert MCDropout(model).fused
    expected = MCDropout(nn.Sequential(model.first, nn.ReLU(), nn.Dropout(0.3), model.second))
    assert all(map(torch.equal, MCDropout(model)(x, seed=4), expected(x, seed=4)))


# --- memory -----------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, torch
from torch import nn
from uefl_kernels.nn import MCDropout
from tests.kernels.mc_dropout_models import Opaque

torch.set_num_threads(1)
inner = nn.Linear(8, 100_000)
head = inner if sys.argv[1] == "fused" else Opaque(inner)  # the fused kernel does not take an Opaque
layer, x = MCDropout(nn.Sequential(nn.Dropout(0.5), head)), torch.randn(4, 8)
assert layer.fused == (sys.argv[1] == "fused")

def peak(passes):
    layer.passes = passes
    with torch.no_grad():
        layer(x, seed=1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

few = peak(40)
print(peak(240) - few)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fused", "any"])
def test_head_of_many_classes_stores_no_passes(kind):
    """200 more passes of 1.6 MB each do not raise the peak memory of a process."""
    done = subprocess.run([sys.executable, "-c", PEAK, kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30 * 1.6e6
