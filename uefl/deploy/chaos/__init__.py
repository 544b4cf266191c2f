"""Faults on purpose, with real processes: the scenarios of ``uefl chaos``, the stage that they play on, and
programs that do wrong."""
