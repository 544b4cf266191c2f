"""FedLLP: learning from label proportions, a step per set."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import uefl_kernels

from ...client.work import Batch, Work
from ...data.federation import Federation
from ...errors import UnfitClient
from ..base import register
from .sets import SetAlgorithm

_DROPOUT = 0.2


@register("fedllp")
class FedLLP(SetAlgorithm):
    """Cross-entropy between the priors of a set and the mean of the predictions of its images.

    The rate of every dropout except the one on the logits is 0.2.
    """

    ops = ("set_proportion_loss",)

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Refuse a client with no set of two images or more."""
        super().check(federation, arm, net)
        small = min(federation.clients, key=lambda client: max(client.sizes.sets))
        if max(small.sizes.sets) < 2:
            why = (
                f"has sets of one image; arm {arm!r} uses one set per step, and batch norm needs two images"
                " or more"
            )
            raise UnfitClient(small.name, why)

    def before_round(self, work: Work) -> None:
        """Set the dropout rates of the method."""
        on_logits = getattr(getattr(work.net, "head", None), "logit_drop", None)
        dropouts = [m for m in work.net.modules() if isinstance(m, torch.nn.Dropout) and m is not on_logits]
        work.memory["rates"] = [(m, m.p) for m in dropouts]
        for m in dropouts:
            m.p = _DROPOUT

    def after_round(self, work: Work) -> None:
        """Restore the dropout rates of the network."""
        for m, p in work.memory.get("rates", ()):
            m.p = p

    def epoch(self, work: Work) -> Iterator[torch.Tensor]:
        """Yield the sets in a random order, except a set of one image, which batch norm cannot process."""
        data = work.sets
        rows_of_set = [(data.sets == m).nonzero().flatten() for m in range(len(data.priors))]
        yield from (
            rows_of_set[m] for m in torch.randperm(len(rows_of_set)).tolist() if len(rows_of_set[m]) > 1
        )

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the loss of one set."""
        offsets = torch.tensor([0, len(batch.positions)], device=batch.images.device)
        target = work.sets.priors[batch.labels[:1]].float().clamp(1e-7, 1 - 1e-7)
        loss: torch.Tensor = uefl_kernels.set_proportion_loss(
            work.logits(batch.images), offsets, target
        ).mean()
        return loss
