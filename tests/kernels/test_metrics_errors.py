"""Refusals of the metrics of classifiers; their values are tested in tests/federated/test_metrics.py."""

from __future__ import annotations

import pytest
import torch

from uefl_kernels.metrics import accuracy, brier, ece, nll

PROBS, LABELS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]), torch.tensor([0, 1, 1])
WRONG = {
    "probs is a list": ([[1.0]], LABELS, TypeError, "probs must be a torch.Tensor, got list"),
    "labels is a list": (PROBS, [0, 1, 1], TypeError, "labels must be a torch.Tensor, got list"),
    "probs of integers": (
        PROBS.long(),
        LABELS,
        TypeError,
        "probs has dtype torch.int64, expected floating point",
    ),
    "labels of floats": (
        PROBS,
        LABELS.float(),
        TypeError,
        "labels has dtype torch.float32, expected int64, the classes by number",
    ),
    "shape of probs": (
        PROBS[0],
        LABELS,
        ValueError,
        r"probs must have shape \[B, C\] with at least one class, got \[2\]",
    ),
    "no classes": (
        PROBS[:, :0],
        LABELS,
        ValueError,
        r"probs must have shape \[B, C\] with at least one class, got \[3, 0\]",
    ),
    "length": (
        PROBS,
        LABELS[:2],
        ValueError,
        r"labels must have shape \[3\], one for each row of probs, got \[2\]",
    ),
    "one label": (PROBS, LABELS[:1], ValueError, r"labels must have shape \[3\], .* got \[1\]"),
    "column of labels": (
        PROBS,
        LABELS[:, None],
        ValueError,
        r"labels must have shape \[3\], .* got \[3, 1\]",
    ),
    "device": (PROBS, LABELS.to("meta"), ValueError, "probs is on cpu and labels on meta; move one of them"),
    "label too high": (PROBS, LABELS + 1, ValueError, r"labels must be in \[0, 2\), got 1 to 2"),
    "label too low": (PROBS, LABELS - 1, ValueError, r"labels must be in \[0, 2\), got -1 to 0"),
    "logits": (
        PROBS * 9 - 4,
        LABELS,
        ValueError,
        r"probs must be in \[0, 1\]; apply softmax to logits first",
    ),
}


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece])
@pytest.mark.parametrize("case", WRONG)
def test_refused(metric, case):
    probs, labels, error, message = WRONG[case]
    with pytest.raises(error, match=f"^{metric.__name__}: {message}"):
        metric(probs, labels)


def test_rows_of_nan_are_seen():
    probs = PROBS.clone()
    probs[0] = float("nan")  # its label is where argmax finds NaN
    assert float(accuracy(probs, LABELS)) == pytest.approx(1 / 3)
    assert all(bool(metric(probs, LABELS).isnan()) for metric in (nll, brier, ece))


@pytest.mark.parametrize("bins", [0, -1, 2.5, True])
def test_bins(bins):
    with pytest.raises(ValueError, match=f"^ece: bins must be an integer of at least 1, got {bins}"):
        ece(PROBS, LABELS, bins)


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece])
def test_labels_of_any_integers(metric):
    assert torch.equal(metric(PROBS, LABELS.to(torch.uint8)), metric(PROBS, LABELS))
