"""Metrics of a classifier and of a codebook; all take and return tensors, so that nothing waits for the host."""

from __future__ import annotations

import torch


def accuracy(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Share of rows whose largest probability is at the label; ``[B, C]``, ``[B]`` -> scalar."""
    return (probs.argmax(-1) == labels).double().mean()


def nll(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean of -ln p(label), in nats; ``[B, C]``, ``[B]`` -> scalar."""
    chosen = probs.gather(-1, labels[:, None]).double()
    return -chosen.clamp_min(torch.finfo(torch.float32).tiny).log().mean()


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


def perplexity(counts: torch.Tensor) -> torch.Tensor:
    """exp of the entropy of codeword usage: how many codewords are in effective use; ``[..., V]`` counts -> ``[...]``."""
    usage = counts.double() / counts.sum(-1, keepdim=True).clamp_min(1)
    effective: torch.Tensor = torch.special.entr(usage).sum(-1).exp()
    return effective
