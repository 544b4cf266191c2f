"""Base classes of the estimators: from scikit-learn, or small ones of our own without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._without_sklearn import ConvergenceWarning, NotFittedError, constraints
    from ._without_sklearn import PlainClusteringEstimator as ClusteringEstimator
    from ._without_sklearn import PlainEstimator as Estimator
else:
    try:
        from ._with_sklearn import ConvergenceWarning, NotFittedError, constraints
        from ._with_sklearn import SklearnClusteringEstimator as ClusteringEstimator
        from ._with_sklearn import SklearnEstimator as Estimator
    except ImportError:
        from ._without_sklearn import ConvergenceWarning, NotFittedError, constraints
        from ._without_sklearn import PlainClusteringEstimator as ClusteringEstimator
        from ._without_sklearn import PlainEstimator as Estimator

__all__ = ["ClusteringEstimator", "ConvergenceWarning", "Estimator", "NotFittedError", "constraints"]
