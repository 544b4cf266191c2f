"""Faults on purpose, with real processes: the scenarios of ``make chaos``, the cluster that they run on, and
programs that do wrong."""
