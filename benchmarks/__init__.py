"""Measurements of the kernels beside their peers: ``python -m benchmarks.run``."""
