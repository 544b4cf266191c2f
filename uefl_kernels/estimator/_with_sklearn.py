"""Provide base classes that inherit from scikit-learn.

The classes add parameters, set_output, metadata routing, tags, and representations in notebooks.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils._param_validation import Interval, StrOptions, validate_parameter_constraints

from .._kmeans_checks import ALGORITHMS, INITS, METRICS
from .._numbers import as_integer

__all__ = [
    "SklearnClusteringEstimator",
    "ConvergenceWarning",
    "SklearnEstimator",
    "NotFittedError",
    "constraints",
]

_COUNT = Interval(Integral, 1, None, closed="left")
_CONSTRAINTS: dict[str, list[Any]] = {
    "n_clusters": [_COUNT],
    "init": [StrOptions(set(INITS)), callable, "array-like"],
    "n_init": [StrOptions({"auto"}), _COUNT],
    "max_iter": [_COUNT],
    "tol": [Interval(Real, 0, None, closed="left")],
    "random_state": [
        Interval(Integral, -(2**63), 2**63 - 1, closed="both"),
        np.random.RandomState,
        np.random.Generator,
        None,
    ],
    "verbose": ["verbose"],
    "copy_x": ["boolean"],
    "algorithm": [StrOptions(set(ALGORITHMS))],
    "n_levels": [_COUNT],
    "balanced": ["boolean"],
    "metric": [StrOptions(set(METRICS))],
}


def constraints(*names: str) -> dict[str, list[Any]]:
    """Return scikit-learn's constraints of some parameters, for ``_parameter_constraints``."""
    return {name: _CONSTRAINTS[name] for name in names}


class SklearnEstimator(BaseEstimator):  # type: ignore[misc]
    """An estimator that takes sparse matrices, and any object with ``__index__`` as an integer parameter."""

    _parameter_constraints: dict[str, list[Any]]

    def _validate_params(self) -> None:
        given = self.get_params(deep=False)
        whole = {name: as_integer(value) for name, value in given.items()}
        seen = {name: value if whole[name] is None else whole[name] for name, value in given.items()}
        validate_parameter_constraints(self._parameter_constraints, seen, caller_name=type(self).__name__)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class _Mixins(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin):  # type: ignore[misc]
    """Mixins of a transformer that clusters."""


class SklearnClusteringEstimator(_Mixins, SklearnEstimator):
    """An estimator that clusters and transforms."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
