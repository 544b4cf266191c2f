"""What the estimators inherit: scikit-learn's base classes where it is installed, or else the little of them
that works alone."""

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
