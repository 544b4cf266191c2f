"""Suites: the tables of a paper as runs, and one report over all of them.

Each run has a seed and a folder of its own.
"""
