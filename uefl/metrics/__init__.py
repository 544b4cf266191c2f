"""Metrics of test predictions that a run may add to the usual ones, one module each."""

from .base import METRICS, check, metric

__all__ = ["METRICS", "check", "metric"]
