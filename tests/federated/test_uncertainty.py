import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from uefl.models.heads import Head
from uefl.uncertainty import (
    Prediction,
    certain,
    ensemble,
    joined,
    mc_dropout,
    of_head,
    of_network,
    without_spread,
)
from uefl_kernels.metrics import entropy


def confident_head(
    p: float, logit_dropout: bool, classes: int = 10
) -> tuple[Head, torch.Tensor, torch.Tensor]:
    """Return a head that is completely sure of the label if its input is the label's one-hot code."""
    head = Head(classes, classes, classes, p, logit_dropout)
    with torch.no_grad():
        head.fc1.weight.copy_(50 * torch.eye(classes))
        head.fc1.bias.zero_()
        head.fc2.weight.copy_(100 * torch.eye(classes) - 50)
        head.fc2.bias.zero_()
    labels = torch.arange(2000) % classes
    return head, torch.nn.functional.one_hot(labels, classes).float(), labels


def test_entropy_of_known_distributions():
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    torch.testing.assert_close(entropy(probs), torch.tensor([0.0, math.log(2)]))


def test_a_confident_head_without_logit_dropout_has_no_entropy():
    head, tokens, _ = confident_head(0.0, False)
    assert float(mc_dropout(head, tokens, 20).entropy.detach().max()) < 1e-6


def test_logit_dropout_puts_a_floor_under_the_entropy():
    # With the top logit dropped in about 2 of 20 passes, no confidence can push the mean below about 0.16
    # nats.
    torch.manual_seed(0)
    head, tokens, _ = confident_head(0.1, True)
    head.drop.p = 0.0
    floor = float(mc_dropout(head, tokens, 20).entropy.detach().mean())
    assert 0.15 < floor < 0.22


@pytest.mark.parametrize("classes", [10, 43])
def test_logit_dropout_bounds_the_accuracy_with_dropout_on(classes):
    torch.manual_seed(0)
    head, tokens, labels = confident_head(0.1, True, classes)
    head.drop.p = 0.0
    hits = [
        (head.train().stochastic(head.prefix(tokens)).argmax(1) == labels).float().mean() for _ in range(40)
    ]
    bound = 0.9 + 0.1 * (1 - 0.9**classes) / (0.1 * classes)
    assert float(torch.stack(hits).mean()) == pytest.approx(bound, abs=0.006)


def test_passes_differ_with_dropout_on():
    torch.manual_seed(0)
    head, tokens = Head(6, 32, 4, 0.5, False), torch.randn(50, 6)
    one, many = mc_dropout(head, tokens, 1), mc_dropout(head, tokens, 1)
    assert not torch.equal(one.probs, many.probs)


@pytest.mark.parametrize("logit_dropout", [False, True])
def test_certain_is_the_head_with_dropout_off(logit_dropout):
    torch.manual_seed(0)
    head, tokens = Head(6, 32, 4, 0.5, logit_dropout), torch.randn(50, 6)
    prediction = certain(head, tokens)
    probs = head.eval().stochastic(head.prefix(tokens)).softmax(-1)
    torch.testing.assert_close(prediction.probs, probs)
    for value in (prediction.entropy, prediction.expected_entropy, prediction.entropy_deterministic):
        torch.testing.assert_close(value, entropy(probs))
    assert float(prediction.mutual_info.max()) == 0


@pytest.mark.parametrize(("passes", "dropout"), [(20, True), (0, False)])
def test_number_of_passes_decides_about_dropout(passes, dropout):
    torch.manual_seed(0)
    head, tokens = Head(6, 32, 4, 0.5, False), torch.randn(50, 6)
    first, second = (of_head(head, tokens, passes).probs for _ in range(2))
    assert torch.equal(first, second) != dropout


def test_a_network_of_any_kind_draws_passes_with_dropout_on():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(12, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 3)
    ).eval()
    images = torch.randn(9, 3, 2, 2)
    drawn = of_network(net, images, 4000, contextlib.nullcontext)
    assert not net[2].training
    net[2].train()
    plain = torch.stack([net(images).softmax(-1) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(drawn.probs, plain, atol=0.02, rtol=0)
    assert float(drawn.mutual_info.detach().min()) > 0
    net.eval()
    certain_ = of_network(net, images, 0, contextlib.nullcontext)
    torch.testing.assert_close(certain_.probs, net(images).softmax(-1))
    assert float(certain_.mutual_info.detach().max()) == 0


def test_layers_before_dropout_run_once_for_all_passes(monkeypatch):
    """Layers run once more with dropout off, and a traced network has its current weights."""
    torch.manual_seed(0)
    calls, forward = [], torch.nn.Flatten.forward
    monkeypatch.setattr(torch.nn.Flatten, "forward", lambda self, x: calls.append(len(x)) or forward(self, x))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(12, 3)).eval()
    images = torch.randn(9, 3, 2, 2)
    of_network(net, images, 20, contextlib.nullcontext)
    calls.clear()
    of_network(net, images, 20, contextlib.nullcontext)
    assert calls == [9, 9]
    with torch.no_grad():
        net[2].weight.zero_()
        net[2].bias.copy_(torch.tensor([0.0, 0.0, 50.0]))
    assert of_network(net, images, 3, contextlib.nullcontext).probs[:, 2].tolist() == pytest.approx([1.0] * 9)


def test_predictions_and_extras_of_batches_are_joined():
    pieces = [
        without_spread(torch.randn(n, 4).softmax(-1))._replace(extra={"codes": torch.full((n, 2), n)})
        for n in (2, 3)
    ]
    whole = joined(pieces)
    assert torch.equal(whole.probs, torch.cat([piece.probs for piece in pieces]))
    assert whole.extra["codes"].tolist() == [[2, 2]] * 2 + [[3, 3]] * 3


def test_many_passes_have_the_mean_of_full_forward_passes():
    torch.manual_seed(0)
    head, tokens = Head(6, 32, 4, 0.3, False), torch.randn(5, 6)
    ours = mc_dropout(head, tokens, 3000).probs
    head.train()
    plain = torch.stack([head.stochastic(head.prefix(tokens)).softmax(-1) for _ in range(3000)]).mean(0)
    torch.testing.assert_close(ours, plain, atol=0.01, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_head_is_left_as_found(training):
    head = Head(6, 8, 4, 0.1, False).train(training)
    mc_dropout(head, torch.randn(2, 6), 2)
    assert head.training is training
    assert head.drop.training is training


def test_total_and_expected_entropy_differ():
    torch.manual_seed(0)
    head, tokens = Head(6, 32, 4, 0.5, False), torch.randn(50, 6)
    prediction = mc_dropout(head, tokens, 20)
    assert float(prediction.mutual_info.min()) > 0
    torch.testing.assert_close(prediction.mutual_info, prediction.entropy - prediction.expected_entropy)


def test_the_generator_decides_the_masks():
    head, tokens = Head(6, 32, 4, 0.5, False), torch.randn(50, 6)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(mc_dropout(head, tokens, 3).probs)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def sure(probs: torch.Tensor) -> Prediction:
    return Prediction(probs, *[entropy(probs)] * 3)


def test_an_ensemble_of_equal_members_is_one_of_them():
    probs = torch.randn(7, 4).softmax(-1)
    prediction = ensemble([sure(probs)] * 5)
    assert ensemble([sure(probs)]).probs is probs
    torch.testing.assert_close(prediction.probs, probs)
    torch.testing.assert_close(prediction.entropy, entropy(probs))
    assert float(prediction.mutual_info.max()) < 1e-6


def test_members_with_different_certain_predictions():
    prediction = ensemble([sure(torch.tensor([[1.0, 0.0]])), sure(torch.tensor([[0.0, 1.0]]))])
    assert prediction.entropy.tolist() == pytest.approx([math.log(2)])
    assert prediction.expected_entropy.tolist() == [0]
    assert prediction.mutual_info.tolist() == pytest.approx([math.log(2)])


@pytest.mark.parametrize("members", [[], [torch.ones(2, 3), torch.ones(3, 3)]], ids=["none", "shapes"])
def test_members_that_do_not_fit(members):
    with pytest.raises(ValueError, match=r"ensemble: .*shape"):
        ensemble([sure(member) for member in members])


class Functional(nn.Module):
    """A network with a dropout that is no module, in a forward that fx traces or does not trace."""

    def __init__(self, p: float, traced: bool) -> None:
        super().__init__()
        self.first, self.last, self.p, self.traced = nn.Linear(6, 32), nn.Linear(32, 3), p, traced

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.first(images.flatten(1)).relu()
        if self.traced or bool(hidden.sum() > -1):
            hidden = F.dropout(hidden, self.p, self.training)
        return self.last(hidden)


class RecurrentNet(nn.Module):
    """A network with a dropout only in its LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 32, num_layers=2, dropout=0.5), nn.Linear(32, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.last(self.lstm(images.flatten(1)[None])[0][0])


@pytest.mark.parametrize(
    ("make", "spreads"),
    [
        (lambda: Functional(0.5, traced=True), True),
        (lambda: Functional(0.5, traced=False), True),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 32), nn.AlphaDropout(0.5), nn.Linear(32, 3)), True),
        (RecurrentNet, True),
        (lambda: Functional(0.0, traced=True), False),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), False),
    ],
)
def test_every_kind_of_dropout_is_drawn(make, spreads, recwarn):
    torch.manual_seed(0)
    net, images = make().eval(), torch.randn(8, 1, 2, 3)
    for _ in range(2):
        found = of_network(net, images, 20, contextlib.nullcontext)
        assert bool((found.mutual_info > 1e-6).all()) == spreads
        wanted = entropy(net(images).softmax(-1))
        torch.testing.assert_close(found.entropy_deterministic, wanted, check_dtype=False)
    assert spreads or not recwarn
