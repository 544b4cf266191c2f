"""FedPL: pseudo-labels from the class shares of the sets, then the network's own."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from ...client.work import Batch, Work
from ..base import register
from .sets import SetAlgorithm

_WARM_UP = 5  # rounds on the labels that the class shares suggest
_SURE = 0.4  # least probability of a confident prediction
_MIXED = 0.3  # weight of the loss of mixed predictions
_BETA = 0.75


@register("fedpl")
class FedPL(SetAlgorithm):
    """Train with the likeliest class of each set as the label of its images.

    Later train with the network's own predictions.

    The likeliest class comes from the priors that were drawn for the set, as published, or from the priors in
    use if ``data.drawn`` is None. A prediction with a probability of 0.4 or more is a label. The logits of
    each such image are also mixed with the logits of an uncertain one. Without uncertain predictions there is
    no mixed term (the published code then skips the batch).
    """

    def weight_decay(self, work: Work) -> float:
        """Return the weight decay with the penalty added."""
        return super().weight_decay(work) + float(self.parameters.penalty)

    def regularize(self, work: Work, gradient: torch.Tensor) -> bool:
        """Return False: the weight decay of the optimizer contains the penalty."""
        return False

    def before_round(self, work: Work) -> None:
        """Make the initial labels."""
        data = work.sets
        work.memory["guess"] = (data.priors if data.drawn is None else data.drawn).argmax(1)[data.sets]
        seed = torch.randint(2**62, (), generator=work.generator)
        work.memory["draws"] = np.random.default_rng(int(seed))

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy with pseudo-labels."""
        logits = work.logits(batch.images)
        if work.round < _WARM_UP:
            return cross_entropy(logits, work.memory["guess"][batch.positions])
        return self_labeled(logits, work.memory["draws"])


def self_labeled(logits: torch.Tensor, draws: np.random.Generator) -> torch.Tensor:
    """Return the cross-entropy of logits ``[b, K]`` with their confident predictions and with mixtures.

    A mixture joins a confident prediction and another one. Mixing shares come from a Beta distribution.
    """
    confidence, label = logits.detach().softmax(1).max(1)
    sure, unsure = (logits[mask] for mask in (confidence >= _SURE, confidence < _SURE))
    sure_label, unsure_label = label[confidence >= _SURE], label[confidence < _SURE]
    if len(sure) == 0:
        return 0 * logits.sum()
    loss = cross_entropy(sure, sure_label)
    pairs = min(len(sure), len(unsure))
    if pairs == 0:
        return loss
    share = float(draws.beta(_BETA, _BETA))
    mixed = share * sure[:pairs] + (1 - share) * unsure[:pairs]
    both = share * cross_entropy(mixed, sure_label[:pairs]) + (1 - share) * cross_entropy(
        mixed, unsure_label[:pairs]
    )
    return loss + _MIXED * both
