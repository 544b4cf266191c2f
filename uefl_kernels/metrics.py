"""Metrics of probabilistic classifiers.

All metrics take and return tensors, so a GPU and the host do not wait for each other.

Metrics with labels raise TypeError or ValueError for wrong shapes, dtypes and values; they check values only
on the CPU. NaN, the output of a diverged model, is not an error: a row with NaN counts as wrong in the
accuracy, and makes the other metrics NaN.
"""

from __future__ import annotations

from operator import index

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ._checks import check_dense
from ._library import exporting_to_onnx
from ._numbers import is_count


def accuracy(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of rows with the largest probability at the label.

    ``[B, C]`` and ``[B]`` give a scalar.
    """
    labels = _check("accuracy", probs, labels)
    return ((probs.argmax(-1) == labels) & ~probs.isnan().any(-1)).double().mean()


def nll(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean of -ln p(label), in nats.

    ``[B, C]`` and ``[B]`` give a scalar. A probability of zero counts as 2^-126.
    """
    labels = _check("nll", probs, labels)
    chosen = probs.gather(-1, labels[:, None]).double()
    return -chosen.clamp_min(torch.finfo(torch.float32).tiny).log().mean()


def brier(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows of sum_c (p_c - [c = label])^2, in [0, 2].

    ``[B, C]`` and ``[B]`` give a scalar.

    Source: Brier 1950, "Verification of forecasts expressed in terms of probability", eq. 2.
    """
    labels = _check("brier", probs, labels)
    wide = probs.double()
    chosen = wide.gather(-1, labels[:, None]).squeeze(-1)
    return (wide.square().sum(-1) - 2 * chosen + 1).mean()


def ece(probs: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> torch.Tensor:
    """Return the expected calibration error over equal-width bins of the confidence.

    ``[B, C]``, ``[B]`` -> scalar.

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", eq. 3.
    """
    labels = _check("ece", probs, labels)
    if not (is_count(bins) and index(bins) < 2**31):
        raise ValueError(f"ece: bins must be an integer of at least 1, below 2^31, got {bins!r}")
    count = index(bins)
    confidence, predicted = probs.double().max(-1)
    gap = confidence - (predicted == labels).double()
    which = (confidence * count).long().clamp(0, count - 1)
    per_bin = torch.zeros(count, dtype=torch.float64, device=probs.device).index_add(0, which, gap)
    error: torch.Tensor = per_bin.abs().sum() / len(labels)
    return error


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """Return -sum p ln p over the last dimension, in nats, with 0 ln 0 = 0.

    ``[..., C]`` gives ``[...]``. A probability of 0 gets the gradient 0.
    """
    check_dense("entropy", "probs", probs)
    # The gradient of entr at 0 is infinite. Its product with 0, the gradient of a softmax, would be NaN.
    positive = probs.masked_fill(probs == 0, 1)
    nats = -torch.xlogy(positive, positive) if exporting_to_onnx() else torch.special.entr(positive)
    return nats.sum(-1)


def mutual_information(probs: torch.Tensor) -> torch.Tensor:
    """Return the disagreement of passes or members, in nats.

    ``[T, ..., C]`` gives ``[...]``. It is the entropy of the mean prediction minus the mean of the entropies
    of the predictions.

    Source: Houlsby et al. 2011, "Bayesian Active Learning for Classification and Preference Learning" (BALD),
        eq. 1.
    """
    check_dense("mutual_information", "probs", probs)
    return (entropy(probs.mean(0)) - entropy(probs).mean(0)).clamp_min(0)


def _check(op: str, probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the labels as int64, or raise."""
    check_dense(op, "probs", probs)
    check_dense(op, "labels", labels, (getattr(labels, "dtype", torch.int64),))
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{op}: labels has dtype {labels.dtype}, expected int64, the classes by number")
    if probs.dim() != 2 or probs.shape[1] == 0:
        raise ValueError(
            f"{op}: probs must have shape [B, C] with at least one class, got {list(probs.shape)}"
        )
    if labels.shape != probs.shape[:1]:
        raise ValueError(
            f"{op}: labels must have shape [{len(probs)}], one for each row of probs, got"
            f" {list(labels.shape)}"
        )
    if labels.device != probs.device:
        raise ValueError(f"{op}: probs is on {probs.device} and labels on {labels.device}; move one of them")
    labels = labels.long()
    readable = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None
    if probs.device.type == "cpu" and readable and not isinstance(probs, FakeTensor):
        if not bool(((labels >= 0) & (labels < probs.shape[1])).all()):
            raise ValueError(
                f"{op}: labels must be in [0, {probs.shape[1]}), got {int(labels.min())} to"
                f" {int(labels.max())}"
            )
        if bool(((probs < 0) | (probs > 1.01)).any()):  # a mean of probabilities may round to more than 1
            raise ValueError(f"{op}: probs must be in [0, 1]; apply softmax to logits first")
    return labels
