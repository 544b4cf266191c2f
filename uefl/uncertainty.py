"""Predictive uncertainty: what the head says when its dropout stays on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .models.net import Head


class Prediction(NamedTuple):
    """Predictions for B images and C classes."""

    probs: torch.Tensor
    """``[B, C]`` mean over the passes, float32"""
    entropy: torch.Tensor
    """``[B]`` entropy of the mean, in nats"""
    entropy_deterministic: torch.Tensor
    """``[B]`` entropy of one pass with dropout off, in nats"""


def mc_dropout(head: Head, tokens: torch.Tensor, passes: int, *, legacy: bool = False) -> Prediction:
    """Monte-Carlo dropout: ``passes`` draws of everything from the first dropout on, the part before it once.

    Args:
        head: its mode is left as found; batch norm does not occur in it.
        tokens: ``[B, ...]``, quantised where the arm has a codebook.
        passes: T, at least 1. Masks come from torch's generator.
        legacy: leave dropout off, as the published evaluation does; all passes are then the same.

    Source: Gal and Ghahramani 2016; entropy of the mean prediction, Liu et al. 2024 (UEFL), eq. 6.

    Equivalent to::

        probs = torch.stack([head(tokens).softmax(-1) for _ in range(passes)]).mean(0)  # dropout on
    """
    training = head.training
    hidden = head.prefix(tokens)
    head.eval()
    deterministic = head.stochastic(hidden).float().softmax(-1)
    head.train(not legacy)
    probs = torch.zeros_like(deterministic)
    for _ in range(passes):
        probs += head.stochastic(hidden).float().softmax(-1)
    head.train(training)
    probs /= passes
    return Prediction(probs, entropy(probs), entropy(deterministic))


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """-sum p ln p over the last dimension, in nats; 0 ln 0 = 0."""
    nats: torch.Tensor = torch.special.entr(probs).sum(-1)
    return nats
