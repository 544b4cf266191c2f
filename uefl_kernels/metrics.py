"""Metrics of probabilistic classifiers; all take and return tensors, so that nothing waits for the host."""

from __future__ import annotations

import torch


def accuracy(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Share of rows whose largest probability is at the label; ``[B, C]``, ``[B]`` -> scalar."""
    return (probs.argmax(-1) == labels).double().mean()


def nll(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean of -ln p(label), in nats; ``[B, C]``, ``[B]`` -> scalar. A probability of zero counts as 2^-126."""
    chosen = probs.gather(-1, labels[:, None]).double()
    return -chosen.clamp_min(torch.finfo(torch.float32).tiny).log().mean()


def brier(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the rows of sum_c (p_c - [c = label])^2, in [0, 2]; ``[B, C]``, ``[B]`` -> scalar.

    Source: Brier 1950, "Verification of forecasts expressed in terms of probability", eq. 2.
    """
    wide = probs.double()
    chosen = wide.gather(-1, labels[:, None]).squeeze(-1)
    return (wide.square().sum(-1) - 2 * chosen + 1).mean()


def ece(probs: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> torch.Tensor:
    """Expected calibration error over equal-width bins of the confidence; ``[B, C]``, ``[B]`` -> scalar.

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", eq. 3.
    """
    confidence, predicted = probs.double().max(-1)
    gap = confidence - (predicted == labels).double()
    which = (confidence * bins).long().clamp(0, bins - 1)
    per_bin = torch.zeros(bins, dtype=torch.float64, device=probs.device).index_add_(0, which, gap)
    error: torch.Tensor = per_bin.abs().sum() / len(labels)
    return error


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """-sum p ln p over the last dimension, in nats; 0 ln 0 = 0; ``[..., C]`` -> ``[...]``."""
    nats: torch.Tensor = torch.special.entr(probs).sum(-1)
    return nats


def mutual_information(probs: torch.Tensor) -> torch.Tensor:
    """What passes or members disagree about, in nats: the entropy of their mean less their mean entropy; ``[T, ..., C]`` -> ``[...]``.

    Source: Houlsby et al. 2011, "Bayesian Active Learning for Classification and Preference Learning" (BALD), eq. 1.
    """
    return (entropy(probs.mean(0)) - entropy(probs).mean(0)).clamp_min(0)
