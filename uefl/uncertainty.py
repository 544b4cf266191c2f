"""Predictive uncertainty by Monte Carlo dropout or by a deep ensemble."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

import uefl_kernels
from uefl_kernels.metrics import entropy
from uefl_kernels.nn import MCDropout, NoDropoutError

from .models.heads import Head
from .models.net import Net


class Prediction(NamedTuple):
    """Predictions for B images and C classes, with entropies in nats."""

    probs: torch.Tensor
    """``[B, C]`` mean over the passes or members, float32"""
    entropy: torch.Tensor
    """``[B]`` entropy of the mean: the uncertainty of the prediction"""
    expected_entropy: torch.Tensor
    """``[B]`` mean entropy of the passes or members"""
    entropy_deterministic: torch.Tensor
    """``[B]`` entropy of one pass with dropout off; in an ensemble, of the first member"""
    extra: Mapping[str, torch.Tensor] = {}
    """further tensors of the algorithm, ``[B, ...]`` each"""

    @property
    def mutual_info(self) -> torch.Tensor:
        """Return how much passes or members disagree ``[B]``: entropy of the mean minus mean entropy."""
        return (self.entropy - self.expected_entropy).clamp_min(0)


def of_network(
    net: nn.Module, images: torch.Tensor, passes: int, amp: Callable[[], AbstractContextManager[None]]
) -> Prediction:
    """Predict images from ``passes`` passes with dropout on, or from one with dropout off.

    Args:
        net: from images ``[B, C, H, W]`` to logits ``[B, classes]``, in evaluation mode. A
            :class:`~uefl.models.net.Net` computes its features once. :class:`~uefl_kernels.nn.MCDropout` cuts
            any other network at its first dropout. The part before this dropout runs once.
        passes: T; 0: dropout off.
        amp: the autocast context of a pass.
    """
    if isinstance(net, Net) and isinstance(net.head, Head):
        with amp():
            return of_head(net.head, net.tokens(images), passes)
    with amp():
        plain = net(images).float().softmax(-1)
        layer = _dropout_layer(net, images[:1]) if passes else None
        if layer is None:
            return without_spread(plain)
        layer.passes = passes
        drawn = layer(images)
    return Prediction(drawn.mean_probs, drawn.entropy, drawn.expected_entropy, entropy(plain))


@lru_cache(maxsize=2)  # of the current arm: a network is traced once, and its weights change in place
def _kept(net: nn.Module) -> list[MCDropout | None]:
    """Return an empty list for each network, for its layer."""
    return []


def _dropout_layer(net: nn.Module, image: torch.Tensor) -> MCDropout | None:
    """Return the layer that draws passes of a network, or None if it has no dropout."""
    kept = _kept(net)
    if not kept:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of passes that a network without dropout does not need
                MCDropout(net, passes=1)(image, seed=0)
            kept.append(MCDropout(net))
        except NoDropoutError as error:
            if error.inactive:
                raise
            kept.append(None)
    return kept[0]


def of_head(head: nn.Module, tokens: torch.Tensor, passes: int) -> Prediction:
    """Predict from tokens ``[B, ...]``: with :func:`mc_dropout`, or with :func:`certain` if ``passes`` is 0.

    A head that is not a :class:`~uefl.models.net.Head` is treated as a network, see :func:`of_network`.
    """
    if not isinstance(head, Head):
        return of_network(head, tokens, passes, nullcontext)
    return mc_dropout(head, tokens, passes) if passes else certain(head, tokens)


def without_spread(probs: torch.Tensor) -> Prediction:
    """Return the prediction of one pass, from its probabilities ``[B, C]``, with the entropy in float64."""
    spread = torch.special.entr(probs.double()).sum(1)
    return Prediction(probs, spread, spread, spread)


def mc_dropout(head: Head, tokens: torch.Tensor, passes: int) -> Prediction:
    """Predict by Monte Carlo dropout, from ``passes`` passes.

    A pass begins at the first dropout. The part of the head before this dropout runs once.

    Args:
        head: a module without batch norm; its mode does not change.
        tokens: ``[B, ...]``, as the head takes them.
        passes: T, at least 1. The seed of the masks comes from torch's generator.

    Source: Gal and Ghahramani 2016; entropy of the mean prediction, Zhang, Cao and Liu 2025 (UEFL), eq. 6.

    Equivalent to::

        probs = torch.stack([head(tokens).softmax(-1) for _ in range(passes)]).mean(0)  # dropout on
    """
    hidden = head.prefix(tokens)
    stats = uefl_kernels.mc_dropout_mlp(
        hidden,
        [head.fc2.weight],
        [head.fc2.bias],
        p=[head.drop.p, head.logit_drop.p],
        passes=passes,
        input_dropout=True,
        logit_dropout=True,
    )
    return Prediction(
        stats.mean_probs, stats.entropy, stats.expected_entropy, entropy(_without_dropout(head, hidden))
    )


def certain(head: Head, tokens: torch.Tensor) -> Prediction:
    """Predict from tokens ``[B, ...]`` with one pass and dropout off: ``head.eval()(tokens).softmax(-1)``."""
    probs = _without_dropout(head, head.prefix(tokens))
    spread = entropy(probs)
    return Prediction(probs, spread, spread, spread)


def ensemble(members: Sequence[Prediction]) -> Prediction:
    """Average a deep ensemble: models with their own initialization and order of batches.

    Args:
        members: at least one (five in the paper), for the same images. A single member is returned unchanged.

    Raises:
        ValueError: there are no members, or members have different shapes.

    Source: Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation", section
        2.4.

    Equivalent to ``torch.stack([m.probs for m in members]).mean(0)``, with the entropies of this mean, of the
    members, and of the first member.
    """
    shapes = {tuple(member.probs.shape) for member in members}
    if len(shapes) != 1:
        raise ValueError(
            f"ensemble: expected at least one member, all of one shape [B, C], got {sorted(shapes)}"
        )
    if len(members) == 1:
        return members[0]
    mean = torch.stack([member.probs for member in members]).mean(0)
    expected = torch.stack([member.expected_entropy for member in members]).mean(0)
    return Prediction(mean, entropy(mean), expected, members[0].entropy_deterministic)


def joined(predictions: Sequence[Prediction]) -> Prediction:
    """Concatenate the predictions of batches."""
    extra = {name: torch.cat([each.extra[name] for each in predictions]) for name in predictions[0].extra}
    probs, total, expected, deterministic = (torch.cat([each[i] for each in predictions]) for i in range(4))  # type: ignore[misc]
    return Prediction(probs, total, expected, deterministic, extra)


def _without_dropout(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, head.fc2.weight, head.fc2.bias).float().softmax(-1)
