"""Measure the kernels and their peers: ``python -m benchmarks.run``."""
