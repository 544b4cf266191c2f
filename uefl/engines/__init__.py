"""Engines, which do the work of a round; an engine knows clients, requests and replies, and no algorithm."""
