"""Base classes of the estimators: from scikit-learn, or small ones of our own without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._alone import ClusteringEstimator, ConvergenceWarning, Estimator, NotFittedError, constraints
else:
    try:
        from ._with_sklearn import (
            ClusteringEstimator,
            ConvergenceWarning,
            Estimator,
            NotFittedError,
            constraints,
        )
    except ImportError:
        from ._alone import ClusteringEstimator, ConvergenceWarning, Estimator, NotFittedError, constraints

__all__ = ["ClusteringEstimator", "ConvergenceWarning", "Estimator", "NotFittedError", "constraints"]
