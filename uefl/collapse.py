"""Neural collapse: metrics of features and the last layer in training after zero training error.

Source: Papyan, Han and Donoho 2020, "Prevalence of Neural Collapse during the Terminal Phase of Deep Learning
Training" (PNAS).

If features are in several places, add up their :func:`class_sums`, then the :func:`spread` of each place
about the common means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Collapse(NamedTuple):
    """Metrics of neural collapse, which are 0 at a complete collapse.

    Features are then vertices of a simplex equiangular tight frame, one for each class, and equal to the last
    layer.
    """

    nc1: float
    """tr(S_W S_B^+) / C, the spread within classes in units of the spread between classes"""
    nc2a: float
    """standard deviation over mean of the lengths of the class means; all class means are centered"""
    nc2a_weights: float
    """the same for the rows of the last layer"""
    nc2b: float
    """mean over pairs of classes of |cos + 1 / (C - 1)|, of the centered class means"""
    nc3: float
    """squared distance of the last layer and the centered class means, each scaled to Frobenius norm 1"""
    nc4: float
    """share of images that the network does not put into the class with the nearest mean"""


class ClassSums(NamedTuple):
    """Sums and counts of features by class."""

    sums: torch.Tensor
    """``[C, D]`` float64"""
    counts: torch.Tensor
    """``[C]`` int64"""

    @property
    def present(self) -> torch.Tensor:
        """Return the classes with images, ``[c]`` int64, because others do not count."""
        return self.counts.nonzero().flatten()

    @property
    def means(self) -> torch.Tensor:
        """Return the means of the classes with images, ``[c, D]`` float64."""
        return self.sums[self.present] / self.counts[self.present, None]


def neural_collapse(
    features: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Collapse:
    """Compute the metrics of features in float64, over the classes that have images.

    Args:
        features: ``[N, D]``, the input of the last layer.
        labels: ``[N]`` int64.
        weight: ``[C, D]`` of the last layer.
        bias: ``[C]`` of the last layer.

    Raises:
        ValueError: images of fewer than two classes.
    """
    total = class_sums(features, labels, len(weight))
    within, disagree = (spread(total, features, labels, weight, bias) / len(features)).tolist()
    nc2a, nc2a_weights, nc2b, nc3 = geometry(total, weight).tolist()
    return Collapse(within, nc2a, nc2a_weights, nc2b, nc3, disagree)


def class_sums(features: torch.Tensor, labels: torch.Tensor, classes: int) -> ClassSums:
    """Return sums and counts of ``features [N, D]`` by ``labels [N]``."""
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=features.device)
    return ClassSums(sums.index_add_(0, labels, features.double()), torch.bincount(labels, minlength=classes))


def spread(
    total: ClassSums,
    features: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sums over ``features [N, D]`` behind the means NC1 and NC4, ``[2]`` float64.

    Arguments as in :func:`neural_collapse`.

    With M^+ the pseudo-inverse of the centered class means, tr(S_W S_B^+) / C is the mean of
    |(h - mean of its class) M^+|^2.
    """
    means, features = total.means, features.double()
    own = means[torch.searchsorted(total.present, labels.contiguous())]
    away = (features - own) @ torch.linalg.pinv(_centered(total))
    logits = torch.nn.functional.linear(features, weight.double(), None if bias is None else bias.double())
    nearest = total.present[torch.cdist(features, means).argmin(1)]
    return torch.stack([away.square().sum(), (logits.argmax(1) != nearest).sum().double()])


def geometry(total: ClassSums, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[4]`` float64: NC2a of the class means and of the rows of ``weight [C, D]``, NC2b, NC3."""
    means, weight = _centered(total), weight.double()[total.present]
    classes = len(means)
    unit = torch.nn.functional.normalize(means, dim=1)
    pairs = ~torch.eye(classes, dtype=torch.bool, device=means.device)
    angles = ((unit @ unit.T)[pairs] + 1 / (classes - 1)).abs().mean()
    dual = (
        (
            torch.nn.functional.normalize(weight.flatten(), dim=0)
            - torch.nn.functional.normalize(means.flatten(), dim=0)
        )
        .square()
        .sum()
    )
    return torch.stack([_variation(means), _variation(weight), angles, dual])


def _centered(total: ClassSums) -> torch.Tensor:
    means = total.means
    if len(means) < 2:
        raise ValueError(f"neural collapse: expected images of two classes or more, got {len(means)}")
    return means - means.mean(0)


def _variation(rows: torch.Tensor) -> torch.Tensor:
    """Return the coefficient of variation of the rows' lengths."""
    lengths = rows.norm(dim=1)
    variation: torch.Tensor = lengths.std(correction=0) / lengths.mean().clamp_min(1e-300)
    return variation
