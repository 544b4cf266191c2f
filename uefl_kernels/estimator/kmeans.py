"""``KMeans``: the estimator, with scikit-learn's conventions, on NumPy arrays and torch tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from .._dtypes import result_dtype
from .._kmeans_checks import ALGORITHMS, check_method, check_request, starts
from .._numbers import as_integer
from ..ops.kmeans import KMeansResult, kmeans
from ..ops.kmeans.blocks import BlockFit, Blocks, kmeans_of_blocks
from ..ops.kmeans.composed import Fit, FitOptions, unit_rows
from ..ops.kmeans_labels import kmeans_distances, kmeans_labels, kmeans_labels_and_squares
from ..ops.kmeans_sparse import (
    SparseRows,
    kmeans_sparse,
    kmeans_sparse_by_steps,
    kmeans_sparse_distances,
    kmeans_sparse_labels,
)
from ..ops.kmeans_step import kmeans_step
from ..ops.kmeans_step.composed import least_power_of_two, mass_bits, require_valid_centers, tree_sum
from ._base import ClusteringEstimator, ConvergenceWarning, constraints
from ._data import (
    Back,
    blocks_of,
    column_names,
    numbers,
    rows_of,
    seed_of,
    source_of,
    sparse_rows_of,
    to_numpy,
)
from ._rows import RowEstimator
from ._verbose import printing


class KMeans(RowEstimator, ClusteringEstimator):
    """k-means clustering with exact labels, with the conventions of scikit-learn.

    The class is built on :func:`uefl_kernels.kmeans`.

    Takes NumPy arrays, lists, data frames, or torch tensors on any device, and returns the same kind. A
    ``numpy.memmap`` is read in blocks, and the work on a sparse matrix follows its non-zeros. scikit-learn is
    not needed; if it is installed, the class inherits from its base classes. The random numbers differ from
    scikit-learn's, so seeds give other starts of the same quality.

    Args:
        n_clusters: number of clusters, at most the number of rows.
        init: ``"k-means++"``, ``"k-means||"``, ``"random"`` or the centers, ``[n_clusters, n_features]``; see
            :func:`uefl_kernels.kmeans`. Or a function that returns the centers: each start calls
            ``init(X, n_clusters, random_state=...)`` with a NumPy ``RandomState``.
        n_init: the number of starts. ``"auto"`` is 10 for ``"random"`` and for a function, and 1 otherwise.
        max_iter: the largest number of iterations of a start.
        tol: see :func:`uefl_kernels.kmeans`.
        verbose: print the inertia of every iteration. This takes a second search in each.
        random_state: an int, a NumPy ``RandomState`` or ``Generator``, or None to draw from torch's
            generator.
        copy_x: accepted for scikit-learn; X is never written to.
        algorithm: ``"lloyd"`` or ``"elkan"``, accepted for scikit-learn: the labels are exact, and bounds are
            used where they save time.
        metric: ``"l2"``, or ``"cosine"`` for spherical k-means.

    Attributes:
        cluster_centers_: ``[n_clusters, n_features]``, float32 for float32 and half-precision data, float64
            for all else.
        labels_: ``[n_samples]`` int64, the nearest of these centers.
        inertia_: weighted sum of the squared distances to them.
        n_iter_: iterations of the start that was kept.
        counts_: ``[n_clusters]`` float64, the sum of the weights of the rows of each cluster; without
            weights, their number.
        n_features_in_, feature_names_in_: as in scikit-learn.

    ``fit`` sets the attributes.

    Raises:
        TypeError, ValueError: in ``fit`` and later: parameters or data that do not fit; data that are not
            finite.
        AttributeError: a method was called before ``fit``.

    Source: as :func:`uefl_kernels.kmeans`; interface: scikit-learn 1.9, ``sklearn.cluster.KMeans``.

    Equivalent to::

        sklearn.cluster.KMeans(
            n_clusters, init=init, n_init=n_init, max_iter=max_iter, tol=tol, random_state=random_state
        )
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = constraints(
        "n_clusters",
        "init",
        "n_init",
        "max_iter",
        "tol",
        "verbose",
        "random_state",
        "copy_x",
        "algorithm",
        "metric",
    )

    cluster_centers_: Any
    labels_: Any
    counts_: Any
    inertia_: float
    n_iter_: int

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: int | str = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        verbose: int = 0,
        random_state: Any = None,
        copy_x: bool = True,
        algorithm: str = "lloyd",
        metric: str = "l2",
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.verbose = verbose
        self.random_state = random_state
        self.copy_x = copy_x
        self.algorithm = algorithm
        self.metric = metric

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KMeans:
        """Cluster the rows of X ``[n_samples, n_features]``.

        ``y`` is ignored.

        Returns self.

        A ``numpy.memmap`` is read in blocks each time that the fit reads the rows; the result has the same
        bits as with the rows in memory. The work on a sparse matrix follows its non-zeros: centers and labels
        are the same bits, inertia agrees up to rounding. With ``sample_weight`` centers agree up to rounding,
        too.
        """
        self._check_parameters()
        source, names = source_of("KMeans", X), column_names(X)
        if source is not None:
            weights = self._weights(sample_weight, source.n)
            if hasattr(X, "tocsr"):
                sparse = self._sparse_rows(X, self.metric == "cosine")
                requests = self._requests(source.n, source.d, X)
                fit = min(
                    (self._cluster_sparse(sparse, weights, asked) for asked in requests),
                    key=lambda fit: float(fit.inertia),
                )
                self._keep(fit, _counts(fit.labels, weights, len(fit.centers)), to_numpy, names)
                return self
            found_in = [
                self._cluster_blocks(source.blocks(), weights, asked)
                for asked in self._requests(source.n, source.d, X)
            ]
            self._keep(*min(found_in, key=lambda found: float(found.fit.inertia)), to_numpy, names)
            return self
        x, back = rows_of("KMeans", X)
        weights = self._weights(sample_weight, len(x), x.device)
        fits = [self._cluster(x, weights, asked) for asked in self._requests(x.shape[0], x.shape[1], X)]
        found = min(fits, key=lambda found: float(found.inertia))
        self._keep(found, _counts(found.labels, weights, len(found.centers)), back, names)
        return self

    def fit_blocks(self, blocks: Any, *, sample_weight: Any = None, group: Any = None) -> KMeans:
        """Cluster rows that are not in memory at once, or not in one process.

        The result has the same bits as a fit of all rows together.

        Args:
            blocks: arrays or tensors ``[n_i, n_features]`` of one dtype, read again for every pass: a list,
                another iterable that can be read again, or a function that returns an iterator.
                ``"k-means||"``
                takes fewer passes than ``"k-means++"``, which takes two for each center.
            sample_weight: ``[n_samples]``, of the rows of all blocks.
            group: a group of ``torch.distributed`` with a backend for the CPU (gloo), each process with
                blocks of its own; their rows count in the order of the ranks. ``labels_`` belong to the rows
                of the process; all else is the same in all processes. None: one process.

        Returns:
            self. In memory are one block and some tens of bytes a row, with ``"k-means++"`` 8 (2 + ln
            n_clusters) more.

        Raises:
            TypeError, ValueError: as for ``fit``; the blocks can be read only once, or change between two
                reads; the processes disagree; another process could not use its rows.
        """
        self._check_parameters()
        if callable(self.init):
            raise TypeError(
                "KMeans: fit_blocks has no X for the function init; call the function and pass its centers"
            )
        read = blocks_of("KMeans", blocks)
        weights = None if sample_weight is None else self._weights(sample_weight, None)
        found, counts = self._cluster_blocks(read, weights, lambda n, d: self._requests(n, d)[0], group)
        self._keep(found, counts, to_numpy, None)
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KMeans:
        """Move the centers by more rows, which are not kept.

        The first call is ``fit`` and needs at least ``n_clusters`` rows.

        A center becomes the mean of all rows of its cluster so far, including the rows of this call
        (``metric="cosine"``: scaled to length 1). ``labels_`` and ``inertia_`` describe X with the new
        centers.

        Source: MacQueen 1967; Sculley 2010, "Web-scale k-means clustering"; Zhong 2005, "Efficient online
            spherical k-means clustering".
        """
        if not self.__sklearn_is_fitted__():
            return self.fit(X, sample_weight=sample_weight)
        self._check_parameters()
        x, back = self._rows(X)
        centers, before = (
            rows_of("KMeans", value)[0].to(x.device)
            for value in (self.cluster_centers_, self.counts_[:, None])
        )
        rows = self._prepared(x).to(centers.dtype)
        weights = self._weights(sample_weight, len(x), x.device)
        with in_words_of("KMeans"):
            found = kmeans_step(rows, centers, weights=weights)
            counts = before + found.masses[:, None]
            means = torch.where(
                counts > 0, (centers.double() * before + found.sums) / counts, centers.double()
            )
            centers = (unit_rows(means) if self._spherical else means).to(centers.dtype)
            found = kmeans_step(rows, centers, weights=weights, units=found.units)
        self.cluster_centers_, self.counts_ = back(centers), back(counts[:, 0])
        self.labels_, self.inertia_ = back(found.labels), float(found.inertia)
        self.n_iter_ += 1
        return self

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Call ``fit(X)`` and return the labels ``[n_samples]``."""
        return self.fit(X, sample_weight=sample_weight).labels_

    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Call ``fit(X)`` and return ``transform(X)``."""
        return self.fit(X, sample_weight=sample_weight)._transform(X)

    def predict(self, X: Any) -> Any:
        """Return the nearest center of each row, ``[n_samples]`` int64."""
        if hasattr(X, "tocsr"):
            return to_numpy(
                self._sparse_fitted(X, lambda rows, centers: kmeans_sparse_labels(rows, centers)[0])
            )
        blocks, centers, back = self._fitted(X)
        with in_words_of("KMeans"):
            return back(_joined([kmeans_labels(block, centers) for block in blocks]))

    def transform(self, X: Any) -> Any:
        """Return the distance of each row to each center, ``[n_samples, n_clusters]``."""
        return self._transform(X)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return minus the inertia of X."""
        if hasattr(X, "tocsr"):
            weights = self._weights(sample_weight, X.shape[0])
            squares = self._sparse_fitted(X, lambda rows, centers: kmeans_sparse_labels(rows, centers)[1])
            return -float(tree_sum(squares if weights is None else squares * weights))
        blocks, centers, _ = self._fitted(X)
        weights = self._weights(sample_weight, X.shape[0] if hasattr(X, "shape") else len(X), centers.device)
        with in_words_of("KMeans"):
            squares = _joined([kmeans_labels_and_squares(block, centers)[1] for block in blocks])
        return -float(tree_sum(squares if weights is None else squares * weights))

    def __sklearn_is_fitted__(self) -> bool:
        """Return True after a fit."""
        return hasattr(self, "cluster_centers_")

    @property
    def _n_features_out(self) -> int:
        """Return the number of columns of ``transform``."""
        return len(self.cluster_centers_)

    def _check_parameters(self) -> None:
        self._validate_params()
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"KMeans: algorithm {self.algorithm!r} is not known, expected one of {ALGORITHMS}"
            )

    def _requests(self, n: int, d: int, X: Any = None) -> list[FitOptions]:
        """Return the requests for n rows of d elements.

        There is one, or one for each start if ``init`` is a function of X.
        """
        k, seed = as_integer(self.n_clusters), seed_of(self.random_state)
        if k is not None and n < k:
            raise ValueError(f"n_samples={n} should be >= n_clusters={k}.")
        asked = (self.n_clusters, self.n_init, self.max_iter, self.tol, seed, self.metric)
        k, max_iter, seed = check_request(
            "KMeans", n, d, *asked, k_name="n_clusters", seed_name="random_state"
        )
        if k == 1 and self.algorithm == "elkan":
            warnings.warn(
                "algorithm='elkan' doesn't make sense for a single cluster. Using 'lloyd' instead.",
                RuntimeWarning,
                stacklevel=3,
            )
        request = FitOptions("given", None, k, seed, 1, max_iter, float(self.tol))
        if isinstance(self.init, str):
            check_method("KMeans", self.init)
            return [request._replace(method=self.init, n_init=starts(self.n_init, self.init))]
        if callable(self.init):
            state = self.random_state
            state = state if isinstance(state, np.random.RandomState) else np.random.RandomState(seed % 2**32)
            count = 10 if self.n_init == "auto" else int(self.n_init)
            return [
                request._replace(given=_given(self.init(X, k, random_state=state), k, d))
                for _ in range(count)
            ]
        if self.n_init != "auto" and int(self.n_init) > 1:
            warnings.warn(
                "Explicit initial center position passed: performing only one init in KMeans instead of"
                f" n_init={self.n_init}.",
                RuntimeWarning,
                stacklevel=3,
            )
        return [request._replace(given=_given(self.init, k, d))]

    def _cluster(
        self, x: torch.Tensor, weights: torch.Tensor | None, asked: FitOptions
    ) -> KMeansResult | Fit:
        if self.verbose:  # on the CPU, iteration by iteration: the bits are the same
            rows, mass = x.cpu(), None if weights is None else weights.cpu()
            fit = self._cluster_blocks(Blocks(lambda: [rows], rows.__getitem__), mass, asked).fit
            return Fit(*(tensor.to(x.device) for tensor in fit))
        init = asked.method if asked.given is None else asked.given.to(x.device)
        n_init, max_iter, tol, seed, metric = asked.n_init, asked.max_iter, asked.tol, asked.seed, self.metric
        with in_words_of("KMeans"):
            found = kmeans(
                x,
                asked.k,
                weights=weights,
                init=init,
                n_init=n_init,
                max_iter=max_iter,
                tol=tol,
                seed=seed,
                metric=metric,
            )
        if bool(found.inertia.isnan()):  # on a GPU the op does not check the values
            raise ValueError("KMeans: X holds NaN or infinity; remove or replace those rows")
        return found

    def _cluster_blocks(
        self,
        blocks: Blocks,
        weights: torch.Tensor | None,
        asked: FitOptions | Callable[[int, int], FitOptions],
        group: Any = None,
    ) -> BlockFit:
        def request(n: int, d: int) -> FitOptions:
            wanted = asked(n, d) if callable(asked) else asked
            if wanted.given is None:
                return wanted
            require_valid_centers("kmeans", "init", wanted.given)
            assert blocks.like is not None
            return wanted._replace(given=wanted.given.to(result_dtype(blocks.like)))

        with in_words_of("KMeans"):
            advance = printing if self.verbose else None
            return kmeans_of_blocks(blocks, weights, request, self.metric == "cosine", group, advance)

    def _sparse_rows(self, X: Any, spherical: bool, checked: bool = True) -> SparseRows:
        rows = sparse_rows_of("KMeans", X, checked=checked)
        with in_words_of("KMeans"), torch.device("cpu"):  # whatever the default device of the caller
            return rows.unit() if spherical else rows

    def _sparse_fitted(
        self, X: Any, answer: Callable[[SparseRows, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of a function of the rows of a sparse matrix and the centers of the fit."""
        self._check_fitted()
        source = source_of("KMeans", X)
        assert source is not None
        self._check_columns(column_names(X), source.d)
        centers = rows_of("KMeans", self.cluster_centers_)[0].cpu()

        def answered(checked: bool) -> torch.Tensor:
            rows = self._sparse_rows(X, self._spherical, checked)
            with in_words_of("KMeans"), torch.device("cpu"):
                return answer(rows, centers.to(rows.dtype))

        if not self._spherical:
            with contextlib.suppress(
                RuntimeError
            ):  # the op refuses rows that are not in order, which are rare
                return answered(checked=False)
        return answered(checked=True)

    def _cluster_sparse(self, rows: SparseRows, weights: torch.Tensor | None, asked: FitOptions) -> Fit:
        spherical = self.metric == "cosine"
        with in_words_of("KMeans"), torch.device("cpu"):
            if asked.given is not None:
                require_valid_centers("kmeans", "init", asked.given)
                given = asked.given.cpu().to(rows.dtype)
                asked = asked._replace(given=unit_rows(given) if spherical else given)
            if self.verbose:
                return kmeans_sparse_by_steps(rows, weights, asked, spherical, printing)
            return kmeans_sparse(rows, weights, asked, spherical)

    def _keep(self, found: KMeansResult | Fit, counts: torch.Tensor, back: Back, names: Any) -> None:
        """Set the attributes that a fit leaves."""
        used, k = int((counts > 0).sum()), len(counts)
        if used < k:
            warnings.warn(
                f"Number of distinct clusters ({used}) found smaller than n_clusters ({k}). Possibly due to"
                " duplicate points in X.",
                ConvergenceWarning,
                stacklevel=3,
            )
        self._keep_columns(names, found.centers.shape[1])
        self._spherical = self.metric == "cosine"  # set_params may change metric before the next fit
        self.cluster_centers_ = back(found.centers)
        self.labels_ = back(found.labels)
        self.counts_ = back(counts)
        self.inertia_ = float(found.inertia)
        self.n_iter_ = int(found.iterations)

    def _transform(self, X: Any) -> Any:
        if hasattr(X, "tocsr"):
            return to_numpy(self._sparse_fitted(X, kmeans_sparse_distances))
        blocks, centers, back = self._fitted(X)
        with in_words_of("KMeans"):
            return back(_joined([kmeans_distances(block, centers) for block in blocks]))

    def _fitted(self, X: Any) -> tuple[Iterator[torch.Tensor], torch.Tensor, Back]:
        """Return the rows in blocks as in the fit, the centers, and a function that converts results.

        Centers are in the dtype of the rows.
        """
        self._check_fitted()
        source = source_of("KMeans", X)
        if source is None:
            x, back = self._rows(X)
            like, blocks = x, iter([x])
        else:
            self._check_columns(column_names(X), source.d)
            like, blocks, back = source.select(slice(0, 1)), iter(source), to_numpy
        centers = rows_of("KMeans", self.cluster_centers_)[0].to(
            like.device, torch.float64 if like.dtype == torch.float64 else torch.float32
        )
        return (self._prepared(block) for block in blocks), centers, back

    def _prepared(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows scaled to unit length for the cosine metric.

        NaN and infinity stay.
        """
        return unit_rows(x.to(result_dtype(x))) if self._spherical else x.detach()

    def _weights(
        self, sample_weight: Any, n: int | None, device: torch.device | str = "cpu"
    ) -> torch.Tensor | None:
        if sample_weight is None:
            return None
        if n is not None and isinstance(sample_weight, (int, float, np.number)):
            sample_weight = np.full(n, float(sample_weight))
        weights = numbers("KMeans", "sample_weight", sample_weight).double().to(device)
        expected = "n_samples" if n is None else n
        if weights.dim() != 1 or (n is not None and len(weights) != n):
            raise ValueError(f"KMeans: sample_weight must have shape [{expected}], got {list(weights.shape)}")
        if not bool(
            (weights >= 0).all()
            and (weights <= 2.0**1000).all()
            and (n is None or bool((weights >= 2.0**-900).any()))
        ):
            raise ValueError(
                "KMeans: sample_weight must be finite (at most 2^1000), not negative, and not all zero (or"
                " below 2^-900)"
            )
        return weights


def _given(init: Any, k: int, d: int) -> torch.Tensor:
    """Return the centers that a caller gives, [k, d] float32 or float64.

    Raise ValueError, in scikit-learn's words, for another shape.
    """
    given = numbers("KMeans", "init", init)
    shape = tuple(given.shape)
    if len(shape) != 2 or shape[0] != k:
        raise ValueError(
            f"The shape of the initial centers {shape} does not match the number of clusters {k}."
        )
    if shape[1] != d:
        raise ValueError(
            f"The shape of the initial centers {shape} does not match the number of features of the data {d}."
        )
    return given


def _counts(labels: torch.Tensor, weights: torch.Tensor | None, k: int) -> torch.Tensor:
    """Sum the weights of the rows of each cluster, [k] float64, as whole numbers, so in any order."""
    if weights is None:
        return torch.bincount(labels, minlength=k).double()
    unit, scale = least_power_of_two(weights.max()), 2.0 ** mass_bits(len(labels))
    masses = (weights / unit * scale).round().long()
    return torch.zeros_like(masses[:1].expand(k)).index_add_(0, labels, masses).double() / scale * unit


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


@contextlib.contextmanager
def in_words_of(estimator: str) -> Iterator[None]:
    """Turn errors of an op, or of ``KMeans``, about values into errors of an estimator."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        op, _, rest = str(error).partition(": ")
        if op not in ("kmeans", "kmeans_step", "kmeans_labels", "KMeans"):
            raise
        rest = f"X{rest[1:]}" if rest.startswith("x ") else rest
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{estimator}: {rest}") from None
