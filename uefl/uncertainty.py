"""Predictive uncertainty: what a head says when its dropout stays on, or what the members of an ensemble say together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

import uefl_kernels

from .metrics import entropy
from .models.net import Head


class Prediction(NamedTuple):
    """Predictions for B images and C classes; entropies in nats."""

    probs: torch.Tensor
    """``[B, C]`` mean over the passes or members, float32"""
    entropy: torch.Tensor
    """``[B]`` entropy of the mean: the uncertainty that decides about an extension"""
    expected_entropy: torch.Tensor
    """``[B]`` mean entropy of the passes or members"""
    entropy_deterministic: torch.Tensor
    """``[B]`` entropy of one pass with dropout off; of an ensemble, that of the first member"""

    @property
    def mutual_info(self) -> torch.Tensor:
        """``[B]`` what the passes or members disagree about."""
        return (self.entropy - self.expected_entropy).clamp_min(0)


def mc_dropout(head: Head, tokens: torch.Tensor, passes: int, *, legacy: bool = False) -> Prediction:
    """Monte-Carlo dropout: ``passes`` draws of everything from the first dropout on, the part before it once.

    Args:
        head: its mode is left as found; batch norm does not occur in it.
        tokens: ``[B, ...]``, quantised where the arm has a codebook.
        passes: T, at least 1. The seed of the masks comes from torch's generator.
        legacy: leave dropout off, as the published evaluation does; all passes are then the same.

    Source: Gal and Ghahramani 2016; entropy of the mean prediction, Liu et al. 2024 (UEFL), eq. 6.

    Equivalent to::

        probs = torch.stack([head(tokens).softmax(-1) for _ in range(passes)]).mean(0)  # dropout on
    """
    hidden = head.prefix(tokens)
    deterministic = torch.nn.functional.linear(hidden, head.fc2.weight, head.fc2.bias).float().softmax(-1)
    certain = entropy(deterministic)
    if legacy:
        return Prediction(deterministic, certain, certain, certain)
    stats = uefl_kernels.mc_dropout_mlp(
        hidden,
        [head.fc2.weight],
        [head.fc2.bias],
        p=[head.drop.p, head.logit_drop.p],
        passes=passes,
        input_dropout=True,
        logit_dropout=True,
    )
    return Prediction(stats.mean_probs, stats.entropy, stats.expected_entropy, certain)


def ensemble(probs: Sequence[torch.Tensor]) -> Prediction:
    """A deep ensemble: members of their own initialisation and order of batches, dropout off, averaged.

    Args:
        probs: ``[B, C]`` of each member, at least one (five in the paper).

    Raises:
        ValueError: no members, or members whose shapes differ.

    Source: Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation", section 2.4.

    Equivalent to ``torch.stack(probs).mean(0)`` and the entropies of it, of the members, and of the first member.
    """
    shapes = {tuple(member.shape) for member in probs}
    if len(shapes) != 1:
        raise ValueError(f"ensemble: expected at least one member, all of one shape [B, C], got {sorted(shapes)}")
    stack = torch.stack([member.float() for member in probs])
    mean, each = stack.mean(0), entropy(stack)
    return Prediction(mean, entropy(mean), each.mean(0), each[0])
