"""Estimators with scikit-learn's conventions, on NumPy arrays and torch tensors."""

from .kmeans import KMeans
from .residual import CollisionReport, ResidualKMeans, collision_report

__all__ = ["CollisionReport", "KMeans", "ResidualKMeans", "collision_report"]
