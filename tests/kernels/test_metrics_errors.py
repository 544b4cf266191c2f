"""Errors of the metrics of classifiers.

``tests/federated/test_metrics.py`` tests the values.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from uefl_kernels.metrics import accuracy, brier, ece, entropy, mutual_information, nll

PROBS, LABELS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]), torch.tensor([0, 1, 1])
WRONG = {
    "probs is a list": ([[1.0]], LABELS, TypeError, r"probs.*torch\.Tensor.*list"),
    "sparse probs": (PROBS.to_sparse(), LABELS, TypeError, "probs.*sparse_coo"),
    "labels is a list": (PROBS, [0, 1, 1], TypeError, r"labels.*torch\.Tensor.*list"),
    "probs of integers": (PROBS.long(), LABELS, TypeError, r"probs.*torch\.int64"),
    "labels of floats": (PROBS, LABELS.float(), TypeError, r"labels.*torch\.float32.*int64"),
    "quantized": (
        PROBS,
        torch.quantize_per_tensor(LABELS.float(), 1.0, 0, torch.qint8),
        TypeError,
        r"labels.*dequantize\(\)",
    ),
    "shape of probs": (PROBS[0], LABELS, ValueError, r"probs.*\[B, C\].*\[2\]"),
    "no classes": (PROBS[:, :0], LABELS, ValueError, r"probs.*\[B, C\].*\[3, 0\]"),
    "length": (PROBS, LABELS[:2], ValueError, r"labels.*\[3\].*probs.*\[2\]"),
    "one label": (PROBS, LABELS[:1], ValueError, r"labels.*\[3\].*\[1\]"),
    "column of labels": (PROBS, LABELS[:, None], ValueError, r"labels.*\[3\].*\[3, 1\]"),
    "device": (PROBS, LABELS.to("meta"), ValueError, "probs.*cpu.*labels.*meta"),
    "label too high": (PROBS, LABELS + 1, ValueError, r"labels.*\[0, 2\).*got 1.*2"),
    "label too low": (PROBS, LABELS - 1, ValueError, r"labels.*\[0, 2\).*got -1.*0"),
    "logits": (PROBS * 9 - 4, LABELS, ValueError, r"probs.*\[0, 1\].*logits"),
}


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece])
@pytest.mark.parametrize("case", WRONG)
def test_refused(metric, case):
    probs, labels, error, message = WRONG[case]
    with pytest.raises(error, match=f"^{metric.__name__}: {message}"):
        metric(probs, labels)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("metric", [entropy, mutual_information])
def test_probabilities_that_are_no_tensor_of_floats(metric):
    masked = torch.masked.masked_tensor(PROBS, PROBS > 0.5)
    for probs in (PROBS.tolist(), PROBS.numpy(), PROBS.to_sparse(), PROBS.long(), masked):
        with pytest.raises(TypeError, match=f"^{metric.__name__}: probs"):
            metric(probs)


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece])
def test_metrics_under_transforms_and_of_fake_tensors(metric):
    found = torch.func.vmap(metric)(PROBS.expand(2, 3, 2), LABELS.expand(2, 3))
    assert torch.equal(found, metric(PROBS, LABELS).expand(2))
    with FakeTensorMode():
        assert metric(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)).shape == ()


def test_rows_of_nan_give_nan():
    probs = PROBS.clone()
    probs[0] = float("nan")  # its label is where argmax finds NaN
    assert float(accuracy(probs, LABELS)) == pytest.approx(1 / 3)
    assert all(bool(metric(probs, LABELS).isnan()) for metric in (nll, brier, ece))


@pytest.mark.parametrize("bins", [0, -1, 2.5, True])
def test_bins(bins):
    with pytest.raises(ValueError, match=f"^ece: bins.*{bins}"):
        ece(PROBS, LABELS, bins)


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece])
def test_labels_of_any_integers(metric):
    assert torch.equal(metric(PROBS, LABELS.to(torch.uint8)), metric(PROBS, LABELS))
