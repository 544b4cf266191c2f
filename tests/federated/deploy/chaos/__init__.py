"""Cause faults in real processes.

The package has the scenarios of ``make chaos``, their cluster, and faulty programs.
"""
