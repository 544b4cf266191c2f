"""A client's side of a run: the resident network, the step loop, measuring."""
