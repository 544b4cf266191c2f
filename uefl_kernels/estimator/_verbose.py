"""Print the progress of ``KMeans(verbose=1)`` as scikit-learn does."""

from __future__ import annotations

import torch

from ..ops.kmeans import composed
from ..ops.kmeans_step import composed as steps


def printing(step: composed.KMeansStepFunction) -> composed.Advance:
    """Return ``composed.advance`` that prints the inertia of each iteration and why a fit ended.

    Args:
        step: ``kmeans_step`` of the backend; the inertia before the centers move takes one more search.
    """

    def advance(
        data: composed.Problem,
        state: composed.FitState,
        limit: torch.Tensor,
        found: steps.Result,
        spherical: bool,
    ) -> None:
        iteration, before = int(state.iterations), state.centers.clone()
        if iteration == 0:
            print("Initialization complete")
        inertia = data.step(step, before, True)[3] * data.weight_unit
        print(f"Iteration {iteration}, inertia {float(inertia)}.")
        composed.advance(data, state, limit, found, spherical)
        if bool(state.ended):
            shift = float((state.centers.double() - before.double()).square().sum())
            why = (
                f"center shift {shift} within tolerance {float(limit)}" if shift > 0 else "strict convergence"
            )
            print(f"Converged at iteration {iteration}: {why}.")

    return advance
