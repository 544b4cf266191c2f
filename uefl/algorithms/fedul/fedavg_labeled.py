"""FedAvg with the true labels of the clients' images, or of a share of them.

A comparison with this algorithm shows the cost of knowing only class shares.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import Field

from ...client.work import Batch, Work
from ...data.federation import Federation, SetData
from ...errors import UserError
from ...seeds import derive
from ..base import register
from .sets import Labeled, SetAlgorithm, labels_loss


@register("fedavg-labeled")
class FedAvgLabeled(SetAlgorithm):
    """FedAvg with the true label of every image, an upper bound for learning from sets."""

    static_step = True

    class Parameters(Labeled):
        """Parameters of labeled clients."""

        share: float = Field(1.0, gt=0, le=1)
        """share of its images that a client trains on; the same images in every round"""

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Refuse sets without labels."""
        super().check(federation, arm, net)
        data = (client.load() for client in federation.clients)
        if any(isinstance(each, SetData) and each.labels is None for each in data):
            raise UserError(
                f"arm {arm!r} needs labels of the clients' images, which are not known; omit the arm"
            )

    def epoch(self, work: Work) -> Iterator[torch.Tensor]:
        """Yield batches of all images, or of a fixed random share."""
        share = self.parameters.share
        if share == 1:
            yield from super().epoch(work)
            return
        order = torch.randperm(
            work.examples, generator=torch.Generator().manual_seed(derive(work.seed, "labeled", work.client))
        )
        chosen = order[: max(2, round(work.examples * share))]
        shuffled = chosen[torch.randperm(len(chosen))]
        yield from (batch for batch in shuffled.split(work.training.batch_size) if len(batch) > 1)

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy with the true labels."""
        labels = work.sets.labels
        assert labels is not None
        return labels_loss(work, batch.images, labels[batch.positions], self.parameters.loss)
