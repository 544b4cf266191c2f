"""``KMeans``: the estimator, with scikit-learn's conventions, on NumPy arrays and torch tensors."""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

import numpy as np
import torch

from ._checks import DTYPES
from ._kmeans_checks import check_method, check_request, check_shape, native
from .ops.kmeans import kmeans
from .ops.kmeans.reference import unit_rows
from .ops.vq_assign import vq_assign


class KMeans:
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

    _estimator_type = "clusterer"

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
        x, back = self._rows(X, fitting=True)
        if callable(self.init):
            raise TypeError("KMeans: init must be a name or the centres, got a function; call it and pass what it returns")
        (n, d), n_init, tol, metric = x.shape, self.n_init, self.tol, self.metric
        asked = (self.n_clusters, n_init, self.max_iter, tol, _seed(self.random_state), metric)
        k, max_iter, seed = check_request("KMeans", n, d, *asked, k_name="n_clusters", seed_name="random_state")
        init = self.init if isinstance(self.init, str) else _given("init", self.init).to(x.device)
        if isinstance(init, str):
            check_method("KMeans", init)
        else:
            check_shape("KMeans", "init", init.shape, [k, d])
        weights = self._weights(sample_weight, x)
        try:
            found = kmeans(x, k, weights=weights, init=init, n_init=n_init, max_iter=max_iter, tol=tol, seed=seed, metric=metric)
        except RuntimeError as error:  # the op looks at the values while it works
            if not str(error).startswith("kmeans: "):
                raise
            raise ValueError(str(error).replace("kmeans: x ", "KMeans: X ").replace("kmeans: ", "KMeans: ")) from None
        if bool(found.inertia.isnan()):  # on a GPU it does not look
            raise ValueError("KMeans: X holds NaN or infinity; remove or replace those rows")
        self.cluster_centers_ = back(found.centres)
        self.labels_ = back(found.labels)
        self.inertia_ = float(found.inertia)
        self.n_iter_ = int(found.iterations)
        return self

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """``fit(X)``, then the labels ``[n_samples]``."""
        return self.fit(X, sample_weight=sample_weight).labels_

    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """``fit(X)``, then ``transform(X)``."""
        return self.fit(X, sample_weight=sample_weight).transform(X)

    def predict(self, X: Any) -> Any:
        """Nearest centre of each row, ``[n_samples]`` int64."""
        rows, centres, back = self._fitted(X)
        return back(vq_assign(rows, centres)[:, 0])

    def transform(self, X: Any) -> Any:
        """Distance of each row to each centre, ``[n_samples, n_clusters]``."""
        rows, centres, back = self._fitted(X)
        blocks, wide = rows.split(_BLOCK), centres.double()  # squares of float32 may overflow in float32
        found = [torch.cdist(block.double(), wide, compute_mode="donot_use_mm_for_euclid_dist").to(rows.dtype) for block in blocks]
        return back(torch.cat(found))

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

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name."""
        return {name: getattr(self, name) for name in self._parameters()}

    def set_params(self, **params: Any) -> KMeans:
        """Change parameters by name; returns self."""
        known = self._parameters()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"Invalid parameter {name!r} for estimator {self!r}. Valid parameters are: {known}.")
            setattr(self, name, value)
        return self

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Names of the columns of ``transform``."""
        self._check_fitted()
        return np.asarray([f"kmeans{i}" for i in range(len(self.cluster_centers_))], dtype=object)

    def __repr__(self) -> str:
        defaults = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        changed = {name: value for name, value in self.get_params().items() if not _same(value, defaults[name])}
        return f"KMeans({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "cluster_centers_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags  # only scikit-learn asks

        return Tags(
            estimator_type="clusterer",
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(preserves_dtype=["float64", "float32"]),
            input_tags=InputTags(),
        )

    @classmethod
    def _parameters(cls) -> list[str]:
        return sorted(inspect.signature(cls).parameters)

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise _not_fitted()("This KMeans instance is not fitted yet. Call 'fit' with appropriate arguments before using it.")

    def _fitted(self, X: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Rows as the fit saw them, the centres, and the way back to the caller's kind."""
        self._check_fitted()
        x, back = self._rows(X, fitting=False)
        centres = torch.as_tensor(self.cluster_centers_, device=x.device)
        if not bool(torch.isfinite(x).all()):
            raise ValueError("KMeans: X holds NaN or infinity; remove or replace those rows")
        x = x if x.dtype == torch.float64 else x.float()
        return unit_rows(x) if self.metric == "cosine" else x, centres.to(x.dtype), back

    def _rows(self, X: Any, *, fitting: bool) -> tuple[torch.Tensor, Any]:
        if isinstance(X, torch.Tensor):
            x, names, back = _real(X.detach()), None, _keep
        else:
            x, names, back = _tensor(X), _names(X), _to_numpy
        if x.dim() != 2:
            raise ValueError(f"Expected 2D array, got {x.dim()}D array instead. Reshape your data: one row per sample.")
        if x.dtype not in DTYPES:
            x = x.double()
        n, d = x.shape
        if n == 0 or d == 0:
            kind = f"{n} sample(s)" if n == 0 else f"{d} feature(s)"
            raise ValueError(f"Found array with {kind} (shape=({n}, {d})) while a minimum of 1 is required by KMeans.")
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
        weights = _given("sample_weight", sample_weight).to(x.device)
        if tuple(weights.shape) != (len(x),):
            raise ValueError(f"KMeans: sample_weight must have shape [{len(x)}], got {list(weights.shape)}")
        if not bool((weights >= 0).all() and (weights <= 2.0**1000).all() and (weights > 0).any()):
            raise ValueError("KMeans: sample_weight must be finite (at most 2^1000), not negative and not all zero")
        return weights


class NotFittedError(ValueError, AttributeError):
    """An estimator is used before it is fitted."""


def _not_fitted() -> type[Exception]:
    """scikit-learn's own class of that name where it is in use, so that its users catch what they expect."""
    exceptions = sys.modules.get("sklearn.exceptions")
    return NotFittedError if exceptions is None else exceptions.NotFittedError


_COMPLEX = "Complex data not supported: KMeans needs real numbers."
_BLOCK = 1 << 16  # rows whose differences are in memory at a time


def _keep(result: torch.Tensor) -> torch.Tensor:
    return result


def _to_numpy(result: torch.Tensor) -> Any:
    return result.numpy()


def _tensor(X: Any) -> torch.Tensor:
    if hasattr(X, "toarray"):
        raise TypeError("KMeans: sparse data are not supported, expected a dense array; use X.toarray()")
    array = native("KMeans", "X", X)
    if array.dtype.kind == "c":
        raise ValueError(_COMPLEX)
    if array.dtype.kind not in "fiub":
        array = array.astype(np.float64)
    if array.dtype not in (np.float16, np.float32, np.float64):
        array = array.astype(np.float64)
    if array.ndim < 2:
        raise ValueError(f"Expected 2D array, got {array.ndim}D array instead. Reshape your data: one row per sample.")
    whole = array.flags.aligned and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return _shared(array if whole else np.array(array, order="C"))


def _shared(array: Any) -> torch.Tensor:
    """A tensor on the memory of an array, which is only read; torch warns when it could not be written to."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _given(name: str, value: Any) -> torch.Tensor:
    """Weights or centres, in float64."""
    if isinstance(value, torch.Tensor):
        return _real(value.detach()).double()
    array = native("KMeans", name, value)
    if array.dtype.kind == "c":
        raise ValueError(_COMPLEX)
    try:
        return torch.from_numpy(np.array(array, np.float64, order="C"))
    except (TypeError, ValueError):
        raise TypeError(f"KMeans: {name} must hold real numbers, got an array of dtype {array.dtype}") from None


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        raise ValueError(_COMPLEX)
    return tensor


def _names(X: Any) -> Any:
    """Column names of a data frame, when all are strings."""
    columns = getattr(X, "columns", None)
    if columns is None or not all(isinstance(name, str) for name in columns):
        return None
    return np.asarray(list(columns), dtype=object)


def _seed(random_state: Any) -> int:
    if random_state is None:
        return int(torch.randint(2**31, ()))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    return random_state  # type: ignore[no-any-return]  # an int, which is checked


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not hasattr(value, "shape") and value == default)
