"""Engines, which carry the messages and replies of a round.

An engine does not depend on algorithms.
"""
