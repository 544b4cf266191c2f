"""New codewords by k-means, on a client's features or on the centers of several clients."""

from __future__ import annotations

import torch

import uefl_kernels

from ...errors import RunError


def kmeans(
    features: torch.Tensor, k: int, seed: int, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster ``features`` [N, d], or one by one [S, N, d] with weights [S, N], in float32.

    Returns:
        centers [..., k, d] float32, and the number (or the weight) of the rows of each center, [..., k]
        float32, on the CPU; the same bits for any number of threads.

    Raises:
        RunError: fewer rows than clusters, or features that are not finite.
    """
    if features.dim() == 3:
        lots = [
            kmeans(problem, k, seed + i, None if weights is None else weights[i])
            for i, problem in enumerate(features)
        ]
        return torch.stack([centers for centers, _ in lots]), torch.stack([mass for _, mass in lots])
    rows = features.float()
    if len(rows) < k:
        raise RunError(
            f"k-means needs at least {k} feature vectors for {k} codewords, but there are {len(rows)}; use"
            " fewer codewords"
        )
    if not bool(torch.isfinite(rows).all()):
        raise RunError("the encoder's features are not finite: the model has diverged; lower lr")
    weights = None if weights is None else weights.to(rows.device)
    fit = uefl_kernels.kmeans(rows, k, weights=weights, seed=seed % 2**63)
    # on the CPU, where sums have one order
    mass = torch.bincount(
        fit.labels.cpu(), weights=None if weights is None else weights.double().cpu(), minlength=k
    )
    return fit.centers.cpu(), mass.float()
