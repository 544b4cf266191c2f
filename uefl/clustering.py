"""New codewords: k-means on a client's own features, and k-means on the centroids that clients send."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from .errors import RunError


def kmeans(features: torch.Tensor, k: int, seed: int, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster ``features`` [N, d] with scikit-learn's Lloyd and k-means++ seeding.

    One thread, because scikit-learn adds the partial sums of its threads in the order in which they end, and a run must
    repeat bit for bit.

    Returns:
        centroids [k, d] float32 and how many rows (or how much weight) each one stands for, [k] float32, on the CPU.

    Raises:
        RunError: fewer rows than clusters, or features that are not finite.
    """
    rows = features.float().cpu().numpy()
    if len(rows) < k:
        raise RunError(f"k-means needs at least {k} feature vectors for {k} codewords, there are {len(rows)}; use fewer codewords")
    if not np.isfinite(rows).all():
        raise RunError("the encoder's features are not finite: the model has diverged; lower lr")
    sample_weight = None if weights is None else weights.double().cpu().numpy()
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different features than codewords: the spare ones stay unused
        fit = KMeans(k, random_state=seed % 2**32, n_init="auto", max_iter=300, tol=1e-4).fit(rows, sample_weight=sample_weight)
    mass = np.bincount(fit.labels_, weights=sample_weight, minlength=k)
    return torch.from_numpy(fit.cluster_centers_.astype(np.float32)), torch.from_numpy(mass.astype(np.float32))
