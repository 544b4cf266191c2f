import math

import pytest
import torch

from uefl.algorithms.uefl.usage import perplexity
from uefl_kernels import metrics
from uefl_kernels.metrics import mutual_information

PROBS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]])
LABELS = torch.tensor([0, 1, 1, 1])


def test_accuracy():
    assert float(metrics.accuracy(PROBS, LABELS)) == 0.75


def test_nll():
    assert float(metrics.nll(PROBS, LABELS)) == pytest.approx(-sum(map(math.log, (0.9, 0.4, 0.8, 0.7))) / 4, rel=1e-6)


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


def test_ece_of_a_calibrated_bin_is_zero():
    probs = torch.tensor([[0.75, 0.25]] * 4)
    assert float(metrics.ece(probs, torch.tensor([0, 0, 0, 1]))) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(("counts", "expected"), [([5, 5, 5, 5], 4.0), ([7, 0, 0], 1.0), ([0, 0], 1.0)], ids=["uniform", "one", "none"])
def test_perplexity(counts, expected):
    assert float(perplexity(torch.tensor(counts))) == pytest.approx(expected)


def test_perplexity_of_a_batch_of_histograms():
    assert perplexity(torch.tensor([[1, 1], [1, 0]])).tolist() == pytest.approx([2.0, 1.0])
