import math

import pytest
import torch

from tests.federated.tiny import arm, federation, finish, settings
from uefl.algorithms.uefl.usage import perplexity
from uefl_kernels import metrics
from uefl_kernels.metrics import mutual_information

PROBS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]])
LABELS = torch.tensor([0, 1, 1, 1])


def test_accuracy():
    assert float(metrics.accuracy(PROBS, LABELS)) == 0.75


def test_nll():
    assert float(metrics.nll(PROBS, LABELS)) == pytest.approx(
        -sum(map(math.log, (0.9, 0.4, 0.8, 0.7))) / 4, rel=1e-6
    )


def test_nll_of_an_impossible_label_is_large_and_finite():
    assert 50 < float(metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))) < 100


def test_brier():
    expected = (0.1**2 + 0.1**2 + 2 * 0.6**2 + 2 * 0.2**2 + 2 * 0.3**2) / 4
    assert float(metrics.brier(PROBS, LABELS)) == pytest.approx(expected, rel=1e-6)
    assert float(metrics.brier(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))) == 2


def test_mutual_information():
    passes = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    assert mutual_information(passes).tolist() == pytest.approx([math.log(2), 0], abs=1e-7)


def test_ece_by_hand():
    # bins of 1/15: 0.9 and 0.8 and 0.7 and 0.6 fall into four bins of their own
    expected = (abs(0.9 - 1) + abs(0.6 - 0) + abs(0.8 - 1) + abs(0.7 - 1)) / 4
    assert float(metrics.ece(PROBS, LABELS)) == pytest.approx(expected, rel=1e-6)


def test_ece_has_the_requested_number_of_bins():
    probs, labels = torch.tensor([[0.59, 0.41], [0.61, 0.39]]), torch.tensor([0, 1])
    assert float(metrics.ece(probs, labels, bins=10)) == pytest.approx((0.41 + 0.61) / 2, rel=1e-6)
    assert float(metrics.ece(probs, labels, bins=1)) == pytest.approx((0.61 - 0.41) / 2, rel=1e-6)


def test_ece_of_a_calibrated_bin_is_zero():
    probs = torch.tensor([[0.75, 0.25]] * 4)
    assert float(metrics.ece(probs, torch.tensor([0, 0, 0, 1]))) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([5, 5, 5, 5], 4.0), ([7, 0, 0], 1.0), ([0, 0], 1.0)],
    ids=["uniform", "one", "none"],
)
def test_perplexity(counts, expected):
    assert float(perplexity(torch.tensor(counts))) == pytest.approx(expected)


def test_perplexity_of_a_batch_of_histograms():
    assert perplexity(torch.tensor([[1, 1], [1, 0]])).tolist() == pytest.approx([2.0, 1.0])


def test_a_record_has_each_metric_under_its_name():
    """The metrics are of the last model, without dropout, for the test and the holdout images."""
    one, workspace, _ = arm(settings("fedavg", dropout=0.0))
    last = finish(one)[-3:]
    workspace.flat.set(*(one.members[0].state.tensors[name] for name in ("values", "buffers")))
    for client, record in zip(federation().clients, last, strict=True):
        data = client.load()
        with torch.no_grad():
            test, held = (
                workspace.net.eval()(workspace.normalize(part.images)).softmax(1)
                for part in (data.test, data.holdout)
            )
        for name in ("accuracy", "nll", "ece", "brier"):
            assert record[name] == pytest.approx(
                float(getattr(metrics, name)(test, data.test.labels)), abs=1e-5
            ), name
        for name in ("entropy", "entropy_deterministic"):
            assert record[name] == pytest.approx(float(metrics.entropy(test).mean()), abs=1e-5), name
        assert record["holdout_accuracy"] == pytest.approx(float(metrics.accuracy(held, data.holdout.labels)))
        assert record["holdout_nll"] == pytest.approx(float(metrics.nll(held, data.holdout.labels)), abs=1e-5)
        assert record["holdout_entropy"] == pytest.approx(float(metrics.entropy(held).mean()), abs=1e-5)
        error = metrics.entropy(held).double().std() / len(held) ** 0.5
        assert record["holdout_entropy_se"] == pytest.approx(float(error), rel=1e-3)
