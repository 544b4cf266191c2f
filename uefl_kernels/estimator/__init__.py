"""Estimators with scikit-learn's conventions, on NumPy arrays and torch tensors."""

from .kmeans import KMeans

__all__ = ["KMeans"]
