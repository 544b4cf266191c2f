"""``KMeans``: the estimator, with scikit-learn's conventions, on NumPy arrays and torch tensors."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch

from .._kmeans_checks import check_method, check_request, check_shape
from ..ops.kmeans import KMeansResult, kmeans
from ..ops.kmeans.reference import unit_rows
from ..ops.vq_assign import vq_assign
from ._base import ClusteringEstimator, ConvergenceWarning, NotFittedError, constraints
from ._data import Back, check_names, column_names, numbers, rows_of, seed_of


class KMeans(ClusteringEstimator):
    """k-means clustering with exact labels: scikit-learn's ``KMeans`` in its conventions, on :func:`uefl_kernels.kmeans`.

    Takes NumPy arrays (or what ``np.asarray`` makes of lists and data frames) or torch tensors on any device, and gives back the same
    kind. scikit-learn itself is not needed. The seeds are drawn by other random numbers than scikit-learn's: of the same
    quality, not the same ones.

    Args:
        n_clusters: how many clusters, at most the number of rows.
        init: ``"k-means++"``, ``"k-means||"``, ``"random"`` or the centres, ``[n_clusters, n_features]``; see
            :func:`uefl_kernels.kmeans`. A function is not supported: call it and pass what it returns.
        n_init: how many starts; ``"auto"`` is 10 for ``"random"``, or else 1.
        max_iter: at most so many iterations of a start.
        tol: see :func:`uefl_kernels.kmeans`.
        random_state: an int, a NumPy ``RandomState`` or ``Generator``, or None to draw from torch's generator.
        metric: ``"l2"``, or ``"cosine"`` for spherical k-means.

    Attributes (after ``fit``):
        cluster_centers_: ``[n_clusters, n_features]``, float32 for float32 and half-precision data, float64 for all else.
        labels_: ``[n_samples]`` int64, the nearest of these centres.
        inertia_: weighted sum of the squared distances to them.
        n_iter_: iterations of the start that was kept.
        n_features_in_, feature_names_in_: as in scikit-learn.

    Raises:
        TypeError, ValueError: in ``fit`` and later: parameters or data that do not fit; data that are not finite.
        AttributeError: (by what needs a fit) there was none.

    Source: as :func:`uefl_kernels.kmeans`; interface: scikit-learn 1.9, ``sklearn.cluster.KMeans``.

    Equivalent to::

        sklearn.cluster.KMeans(n_clusters, init=init, n_init=n_init, max_iter=max_iter, tol=tol, random_state=random_state)
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = constraints(
        "n_clusters", "init", "n_init", "max_iter", "tol", "random_state", "metric"
    )

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: int | str = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        random_state: Any = None,
        metric: str = "l2",
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.metric = metric

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KMeans:
        """Cluster the rows of X ``[n_samples, n_features]``; ``y`` is ignored. Returns self."""
        if callable(self.init):
            raise TypeError("KMeans: init must be a name or the centres, got a function; call it and pass what it returns")
        self._validate_params()
        x, back = self._rows(X, fitting=True)
        weights = self._weights(sample_weight, x)
        self._keep(self._cluster(x, weights), back)
        return self

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """``fit(X)``, then the labels ``[n_samples]``."""
        return self.fit(X, sample_weight=sample_weight).labels_

    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """``fit(X)``, then ``transform(X)``."""
        return self.fit(X, sample_weight=sample_weight)._transform(X)

    def predict(self, X: Any) -> Any:
        """Nearest centre of each row, ``[n_samples]`` int64."""
        rows, centres, back = self._fitted(X)
        return back(vq_assign(rows, centres)[:, 0])

    def transform(self, X: Any) -> Any:
        """Distance of each row to each centre, ``[n_samples, n_clusters]``."""
        return self._transform(X)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Minus the inertia of X."""
        rows, centres, _ = self._fitted(X)
        weights = self._weights(sample_weight, rows)
        total = 0.0
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            squares = (block.double() - centres[vq_assign(block, centres)[:, 0]].double()).square().sum(1)
            total += float((squares if weights is None else squares * weights[start : start + _BLOCK]).sum())
        return -total

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "cluster_centers_")

    @property
    def _n_features_out(self) -> int:
        """How many columns ``transform`` gives."""
        return len(self.cluster_centers_)

    def _cluster(self, x: torch.Tensor, weights: torch.Tensor | None) -> KMeansResult:
        """The fit itself; what the op says is said of this estimator's names."""
        (n, d), n_init, tol, metric = x.shape, self.n_init, self.tol, self.metric
        asked = (self.n_clusters, n_init, self.max_iter, tol, seed_of(self.random_state), metric)
        k, max_iter, seed = check_request("KMeans", n, d, *asked, k_name="n_clusters", seed_name="random_state")
        init = self.init if isinstance(self.init, str) else numbers("KMeans", "init", self.init).to(x.device)
        if isinstance(init, str):
            check_method("KMeans", init)
        else:
            check_shape("KMeans", "init", init.shape, [k, d])
            if n_init != "auto" and int(n_init) > 1:
                warnings.warn(
                    f"Explicit initial center position passed: performing only one init in KMeans instead of n_init={n_init}.",
                    RuntimeWarning,
                    stacklevel=3,
                )
        try:
            found = kmeans(x, k, weights=weights, init=init, n_init=n_init, max_iter=max_iter, tol=tol, seed=seed, metric=metric)
        except RuntimeError as error:  # the op looks at the values while it works
            if not str(error).startswith("kmeans: "):
                raise
            raise ValueError(str(error).replace("kmeans: x ", "KMeans: X ").replace("kmeans: ", "KMeans: ")) from None
        if bool(found.inertia.isnan()):  # on a GPU it does not look
            raise ValueError("KMeans: X holds NaN or infinity; remove or replace those rows")
        return found

    def _keep(self, found: KMeansResult, back: Back) -> None:
        """Set the attributes that a fit leaves."""
        self.cluster_centers_ = back(found.centres)
        self.labels_ = back(found.labels)
        self.inertia_ = float(found.inertia)
        self.n_iter_ = int(found.iterations)
        k = len(found.centres)
        used = int((torch.bincount(found.labels, minlength=k) > 0).sum())
        if used < k:
            warnings.warn(
                f"Number of distinct clusters ({used}) found smaller than n_clusters ({k}). Possibly due to duplicate points in X.",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _transform(self, X: Any) -> Any:
        rows, centres, back = self._fitted(X)
        blocks, wide = rows.split(_BLOCK), centres.double()  # squares of float32 may overflow in float32
        found = [torch.cdist(block.double(), wide, compute_mode="donot_use_mm_for_euclid_dist").to(rows.dtype) for block in blocks]
        return back(torch.cat(found))

    def _fitted(self, X: Any) -> tuple[torch.Tensor, torch.Tensor, Back]:
        """Rows as the fit saw them, the centres, and the way back to the caller's kind."""
        if not self.__sklearn_is_fitted__():
            raise NotFittedError("This KMeans instance is not fitted yet. Call 'fit' with appropriate arguments before using it.")
        x, back = self._rows(X, fitting=False)
        centres = rows_of("KMeans", self.cluster_centers_)[0].to(x.device)
        if not bool(torch.isfinite(x).all()):
            raise ValueError("KMeans: X holds NaN or infinity; remove or replace those rows")
        x = x if x.dtype == torch.float64 else x.float()
        return unit_rows(x) if self.metric == "cosine" else x, centres.to(x.dtype), back

    def _rows(self, X: Any, *, fitting: bool) -> tuple[torch.Tensor, Back]:
        names = column_names(X)
        if not fitting:
            check_names("KMeans", getattr(self, "feature_names_in_", None), names)
        x, back = rows_of("KMeans", X)
        d = x.shape[1]
        if fitting:
            self.n_features_in_ = d
            if names is not None:
                self.feature_names_in_ = names
            elif hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
        elif d != self.n_features_in_:
            raise ValueError(f"X has {d} features, but KMeans is expecting {self.n_features_in_} features as input.")
        return x, back

    def _weights(self, sample_weight: Any, x: torch.Tensor) -> torch.Tensor | None:
        if sample_weight is None:
            return None
        if isinstance(sample_weight, (int, float)):
            sample_weight = x.new_full((len(x),), float(sample_weight), dtype=torch.float64)
        weights = numbers("KMeans", "sample_weight", sample_weight).to(x.device)
        if tuple(weights.shape) != (len(x),):
            raise ValueError(f"KMeans: sample_weight must have shape [{len(x)}], got {list(weights.shape)}")
        if not bool((weights >= 0).all() and (weights <= 2.0**1000).all() and (weights > 0).any()):
            raise ValueError("KMeans: sample_weight must be finite (at most 2^1000), not negative and not all zero")
        return weights


_BLOCK = 1 << 16  # rows whose differences are in memory at a time
