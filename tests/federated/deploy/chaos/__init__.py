"""Faults on purpose, with real processes: the scenarios of ``make chaos``, the stage that they play on, and
programs that do wrong."""
