"""``balanced_accuracy``: the accuracy with equal weight for all classes."""

from __future__ import annotations

import torch

from .base import metric


@metric("balanced_accuracy")
def balanced_accuracy(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over a client's classes of the share of inputs that are predicted correctly.

    Source: Brodersen et al. 2010, "The Balanced Accuracy and Its Posterior Distribution".
    """
    classes = probs.shape[1]
    right = (probs.argmax(1) == labels).double()
    counts = labels.bincount(minlength=classes)
    found = torch.zeros(classes, dtype=torch.float64, device=labels.device).index_add_(0, labels, right)
    return (found[counts > 0] / counts[counts > 0]).mean()
