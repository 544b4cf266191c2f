"""Suites: the tables of a paper as runs, each with a seed and a folder of its own, and one report over all of
them."""
