"""``ResidualKMeans``: each level clusters the residuals of the level before.

So every row gets a code for each level.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ..ops.kmeans_labels import kmeans_labels
from ._base import Estimator, constraints
from ._data import codes_of, column_names, numbers, rows_of, seed_of
from ._rows import RowEstimator
from .kmeans import KMeans, in_words_of

_BLOCK_ELEMENTS = 1 << 24  # most distances in memory at a time


class CollisionReport(NamedTuple):
    """Collisions of codes."""

    rows: int
    """number of rows"""
    distinct: int
    """number of different codes"""
    colliding: int
    """number of rows that share their code with another row"""
    largest: int
    """number of rows with the most frequent code"""
    used: tuple[int, ...]
    """for each level, the number of its clusters in use"""


def collision_report(codes: Any) -> CollisionReport:
    """Count which rows share their codes.

    Args:
        codes: ``[n_samples, n_levels]`` whole numbers, an array or a tensor, with at least one row.

    Returns:
        :class:`CollisionReport` ``(rows, distinct, colliding, largest, used)``.

    Raises:
        ValueError: a wrong shape.

    Equivalent to::

        counts = np.unique(codes, axis=0, return_counts=True)[1]
        used = tuple(len(np.unique(level)) for level in codes.T)
        len(codes), len(counts), counts[counts > 1].sum(), counts.max(), used
    """
    codes = codes_of("collision_report", codes)
    if codes.dim() != 2 or 0 in codes.shape:
        raise ValueError(
            "collision_report: codes must have shape [n_samples, n_levels] with at least one of each, got"
            f" {list(codes.shape)}"
        )
    counts = codes.unique(dim=0, return_counts=True)[1]
    used = tuple(len(level.unique()) for level in codes.T)
    return CollisionReport(len(codes), len(counts), int(counts[counts > 1].sum()), int(counts.max()), used)


class ResidualKMeans(RowEstimator, Estimator):
    """Compute codes of several levels for every row ("semantic IDs").

    Each level is a :class:`KMeans` of the residuals of the levels before.

    Takes NumPy arrays, objects that NumPy converts, or torch tensors, and returns the same kind. Sparse
    matrices are made dense, because residuals are dense. The same data and seed give the same bits.

    Args:
        n_levels: number of levels.
        n_clusters: number of codes of a level.
        init, n_init, max_iter, tol, random_state: of the k-means of every level; see :class:`KMeans`.
            ``init`` must be a name.
        balanced: in ``fit``, give each code of a level to at most ceil(n_samples / n_clusters) rows. Later
            levels use the residuals of this assignment. The assignment is stable: if a row is nearer to
            another center than to its own, then each row of that center is as near to it or nearer.

    Attributes:
        codebooks_: ``[n_levels, n_clusters, n_features]``, float32 for float32 and half-precision data,
            float64 for all else.
        codes_: ``[n_samples, n_levels]`` int64. Without ``balanced`` they are ``predict(X)``.
        inertia_: ``[n_levels]`` float64, the sum of the squared residuals after each level.
        n_features_in_, feature_names_in_: as in scikit-learn.

    ``fit`` sets the attributes.

    Raises:
        TypeError, ValueError: as :class:`KMeans`.
        AttributeError: a method that needs a fit was called before it.

    Source: Chen, Guan & Wang 2010, "Approximate nearest neighbor search by residual vector quantization";
    semantic IDs: Rajput et al. 2023, "Recommender systems with generative retrieval"; stable assignment: Gale
    & Shapley 1962.

    Equivalent to (not balanced)::

        for level in range(n_levels):
            model = KMeans(n_clusters, random_state=random_state).fit(x)
            codes[:, level] = model.labels_
            x = x - model.cluster_centers_[model.labels_]
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = constraints(
        "n_levels", "n_clusters", "init", "n_init", "max_iter", "tol", "random_state", "balanced"
    )

    codebooks_: Any
    codes_: Any
    inertia_: Any

    def __init__(
        self,
        n_levels: int = 3,
        n_clusters: int = 256,
        *,
        init: str = "k-means++",
        n_init: int | str = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        random_state: Any = None,
        balanced: bool = False,
    ) -> None:
        self.n_levels = n_levels
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.balanced = balanced

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> ResidualKMeans:
        """Compute the codebooks and the codes of the rows of X ``[n_samples, n_features]``.

        ``y`` is ignored. Return self.
        """
        self._validate_params()
        if not isinstance(self.init, str):
            raise TypeError(
                "ResidualKMeans: init must be the name of a seeding, because given centers would fit only"
                " one level"
            )
        if not isinstance(self.n_levels, (int, np.integer)) or self.n_levels < 1:
            raise ValueError(f"ResidualKMeans: n_levels must be an int of at least 1, got {self.n_levels!r}")
        names = column_names(X)
        x, back = rows_of("ResidualKMeans", X)
        rest = _wide(x)
        weights = sample_weight
        if weights is not None and not isinstance(weights, (int, float, np.number)):
            weights = numbers("ResidualKMeans", "sample_weight", weights).to(x.device)
        seed = seed_of(self.random_state)
        codebooks, codes, left = [], [], []
        for _ in range(self.n_levels):
            level = KMeans(
                self.n_clusters,
                init=self.init,
                n_init=self.n_init,
                max_iter=self.max_iter,
                tol=self.tol,
                random_state=seed,
            )
            with in_words_of("ResidualKMeans"):
                level.fit(rest, sample_weight=weights)
            centers = level.cluster_centers_
            labels = balanced_labels(rest, centers) if self.balanced else level.labels_
            rest = rest - centers[labels]
            squares = rest.double().square().sum(1)
            left.append(float((squares if weights is None else squares * weights).sum()))
            codebooks.append(centers)
            codes.append(labels)
        self._keep_columns(names, x.shape[1])
        self.codebooks_, self.codes_ = back(torch.stack(codebooks)), back(torch.stack(codes, 1))
        self.inertia_ = np.array(left)
        return self

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Call ``fit(X)`` and return ``codes_``."""
        return self.fit(X, sample_weight=sample_weight).codes_

    def predict(self, X: Any) -> Any:
        """Return codes ``[n_samples, n_levels]`` int64.

        In each level, the code is the index of the center nearest to the residual of the levels before.
        """
        self._check_fitted()
        x, back = self._rows(X)
        rest, codes = _wide(x), []
        with in_words_of("ResidualKMeans"):
            for centers in self._codebooks(rest):
                labels = kmeans_labels(rest, centers)
                rest = rest - centers[labels]
                codes.append(labels)
        return back(torch.stack(codes, 1))

    def decode(self, codes: Any) -> Any:
        """Return the sums of the centers of codes ``[n_samples, n_levels]``.

        The rows ``[n_samples, n_features]`` are of the type of ``codebooks_``.
        """
        self._check_fitted()
        codebooks = rows_like(self.codebooks_)
        index = codes_of("ResidualKMeans", codes).to(codebooks.device)
        if index.dim() != 2 or index.shape[1] != len(codebooks):
            raise ValueError(
                f"ResidualKMeans: codes must have shape [n_samples, {len(codebooks)}],"
                f" got {list(index.shape)}"
            )
        if index.is_floating_point() or bool(((index < 0) | (index >= codebooks.shape[1])).any()):
            raise ValueError(
                f"ResidualKMeans: codes must be whole numbers from 0 to {codebooks.shape[1] - 1}"
            )
        rows = sum(codebook[index[:, level]] for level, codebook in enumerate(codebooks))
        return rows if isinstance(self.codebooks_, torch.Tensor) else rows.numpy()  # type: ignore[union-attr]

    def __sklearn_is_fitted__(self) -> bool:
        """Return True after a fit."""
        return hasattr(self, "codebooks_")

    def _codebooks(self, like: torch.Tensor) -> torch.Tensor:
        return rows_like(self.codebooks_).to(like.device, like.dtype)


def rows_like(codebooks: Any) -> torch.Tensor:
    """Return codebooks [L, K, d] as a tensor, also from an array that is read-only."""
    if isinstance(codebooks, torch.Tensor):
        return codebooks
    levels, clusters, d = codebooks.shape
    return rows_of("ResidualKMeans", codebooks.reshape(-1, d))[0].reshape(levels, clusters, d)


def balanced_labels(rows: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Return labels [n] that give no center more than ceil(n / k) of the rows [n, d].

    Rows request centers, and a center keeps the nearest rows, in a tie the first. A row requests the nearest
    center that would keep it, until every row has a center. A full center only accepts nearer rows, so a
    center that has refused a row will refuse it again.
    """
    n, k = len(rows), len(centers)
    room = -(-n // k)
    wide = centers.double()
    labels = torch.full((n,), -1, device=rows.device)
    # distance to the center of each row
    kept = torch.full((n,), torch.inf, dtype=torch.float64, device=rows.device)
    # distance and number of the last row that a center keeps
    worst = torch.full((k,), torch.inf, dtype=torch.float64, device=rows.device)
    last = torch.full((k,), n, device=rows.device)
    free = torch.arange(n, device=rows.device)
    while len(free) > 0:
        for some in free.split(max(1, _BLOCK_ELEMENTS // k)):
            distances = torch.cdist(rows[some].double(), wide, compute_mode="donot_use_mm_for_euclid_dist")
            open_to = (distances < worst) | ((distances == worst) & (some[:, None] < last))
            kept[some], labels[some] = distances.masked_fill_(~open_to, torch.inf).min(1)
        asked = torch.zeros(k, dtype=torch.bool, device=rows.device)
        asked[labels[free]] = True
        row = asked[labels].nonzero()[:, 0]
        row = row[kept[row].argsort(stable=True)]
        row = row[labels[row].argsort(stable=True)]  # by center, distance, number
        label = labels[row]
        counts = torch.bincount(label, minlength=k)
        rank = torch.arange(len(row), device=rows.device) - (counts.cumsum(0) - counts)[label]
        full = row[rank == room - 1]
        worst[labels[full]], last[labels[full]] = kept[full], full
        free = row[rank >= room]
    return labels


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32: the residual of a row has more digits."""
    return x if x.dtype == torch.float64 else x.float()
