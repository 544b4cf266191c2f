"""Faults on purpose, with real processes: the scenarios of ``make chaos``, their cluster, and faulty
programs."""
