"""Check the rows and columns that an estimator gets."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .._version import __version__
from ._base import NotFittedError
from ._data import Back, check_names, column_names, rows_of


class RowEstimator:
    """An estimator of rows."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes and the version, for pickle."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return state | {"_uefl_version": __version__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a pickle, and warn if another version has written it."""
        version = state.pop("_uefl_version", "an unknown one")
        if version != __version__:
            warnings.warn(
                f"{type(self).__name__} was pickled by uefl {version}, but uefl {__version__} is installed;"
                " fit it again if a method fails",
                stacklevel=2,
            )
        self.__dict__.update(state)

    def __sklearn_is_fitted__(self) -> bool:
        """Return True after a fit."""
        raise NotImplementedError

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            name = type(self).__name__
            raise NotFittedError(
                f"This {name} instance is not fitted yet. Call 'fit' with appropriate arguments before"
                " using it."
            )

    def _rows(self, X: Any) -> tuple[torch.Tensor, Back]:
        """Return rows with the columns of the fit."""
        x, back = rows_of(type(self).__name__, X)
        self._check_columns(column_names(X), x.shape[1])
        return x, back

    def _keep_columns(self, names: Any, d: int) -> None:
        """Set the number and names of the columns of a fit that has succeeded."""
        self.n_features_in_ = d
        if names is not None:
            self.feature_names_in_ = names
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    def _check_columns(self, names: Any, d: int) -> None:
        """Compare the number and names of columns with the fit."""
        check_names(type(self).__name__, getattr(self, "feature_names_in_", None), names)
        if d != self.n_features_in_:
            raise ValueError(
                f"X has {d} features, but {type(self).__name__} is expecting {self.n_features_in_} features"
                " as input."
            )
