"""Base classes that are used if scikit-learn is not installed: parameters, ``repr``, names of columns."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np


class NotFittedError(ValueError, AttributeError):
    """An estimator is used before it is fitted."""


class ConvergenceWarning(UserWarning):
    """Warn about data that are not enough for a fit, such as fewer different rows than clusters."""


def constraints(*names: str) -> dict[str, list[Any]]:
    """Return an empty dict: only scikit-learn reads ``_parameter_constraints``."""
    return {}


class PlainEstimator:
    """An estimator whose parameters are the arguments of its constructor."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name."""
        return {name: getattr(self, name) for name in sorted(inspect.signature(type(self)).parameters)}

    def set_params(self, **params: Any) -> Any:
        """Change parameters by name, and return self."""
        known = sorted(self.get_params())
        for name, value in params.items():
            if name not in known:
                raise ValueError(
                    f"Invalid parameter {name!r} for estimator {self!r}. Valid parameters are: {known}."
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = {
            name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()
        }
        changed = {
            name: value for name, value in self.get_params().items() if not _same(value, defaults[name])
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def _validate_params(self) -> None:
        """Do nothing: ``fit`` checks the parameters that it uses."""


class PlainClusteringEstimator(PlainEstimator):
    """An estimator that clusters and transforms."""

    @property
    def _n_features_out(self) -> int:
        raise NotImplementedError

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Return the names of the columns of ``transform``.

        If the fit had feature names, ``input_features`` must be equal to them.
        """
        columns = getattr(self, "_n_features_out", None)
        if columns is None:
            raise NotFittedError(
                f"This {type(self).__name__} instance is not fitted yet. Call 'fit' before using it."
            )
        if input_features is not None:
            seen = getattr(self, "feature_names_in_", None)
            if seen is not None and list(seen) != list(input_features):
                raise ValueError("input_features is not equal to feature_names_in_")
            expected: int = self.n_features_in_  # type: ignore[attr-defined]
            if len(input_features) != expected:
                raise ValueError(
                    f"input_features should have length equal to number of features ({expected}), got"
                    f" {len(input_features)}"
                )
        return np.asarray([f"{type(self).__name__.lower()}{i}" for i in range(columns)], dtype=object)


def _same(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and not hasattr(value, "shape") and value == default
    )
