"""Rows of k-means: a whole fit with its seeding, and Lloyd iterations from given centres."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from uefl_kernels import kmeans, vq_assign

from ..registry import Call, Case, Gate, Inputs, Op, needs

ITERATIONS = 10  # of Lloyd; on Gaussian rows none of the cases has converged by then


@dataclass(frozen=True)
class Clusters(Case):
    """n rows of d elements, k clusters."""

    n: int
    d: int
    k: int


def features(case: Clusters, device: str) -> tuple[torch.Tensor, int]:
    """What an encoder with a ReLU at its end gives: 40 loose groups, cut off at zero."""
    generator = torch.Generator().manual_seed(0)
    means = 0.6 * torch.randn(40, case.d, generator=generator)
    x = means[torch.randint(40, (case.n,), generator=generator)] + torch.randn(case.n, case.d, generator=generator)
    return x.relu().to(device), case.k


def gaussian(case: Clusters, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.n, case.d, generator=generator).to(device)
    return x, x[: case.k].clone()


def inertia(x: torch.Tensor, centres: torch.Tensor) -> float:
    rows = x.split(1 << 14)
    return sum(float((block.double() - centres[vq_assign(block, centres)[:, 0]].double()).square().sum()) for block in rows)


def against_other_seeds(inputs: Inputs) -> Callable[[torch.Tensor], float]:
    """How far the inertia is above the mean of ours over five seeds; seeds alone make it differ by some percent."""
    x, k = inputs
    mean = sum(float(kmeans(x, k, seed=seed).inertia) for seed in range(5)) / 5
    return lambda centres: inertia(x, centres) / mean - 1


def against_float64(inputs: Inputs) -> Callable[[torch.Tensor], float]:
    """Relative difference to the inertia of the textbook's iterations in float64."""
    x, centres = inputs[0], inputs[1].double()
    for _ in range(ITERATIONS):
        sums, counts = torch.zeros_like(centres), centres.new_zeros(len(centres))
        for block in x.double().split(1 << 12):
            labels = torch.cdist(block, centres).argmin(1)
            sums.index_add_(0, labels, block)
            counts.index_add_(0, labels, torch.ones_like(block[:, 0]))
        centres = torch.where(counts[:, None] > 0, sums / counts[:, None], centres)
    truth = inertia(x, centres)
    return lambda found: abs(inertia(x, found) / truth - 1)


def fit(inputs: Inputs) -> Call:
    x, k = inputs
    return lambda: kmeans(x, k).centres


def fit_scikit_learn(inputs: Inputs) -> Call:
    """As it comes: greedy k-means++, one start, Lloyd."""
    from sklearn.cluster import KMeans

    x, k = inputs
    needs("cpu", x)
    rows = x.numpy()
    return lambda: torch.from_numpy(KMeans(k, random_state=0, n_init="auto").fit(rows).cluster_centers_)


def lloyd(inputs: Inputs) -> Call:
    """With labels and inertia for the last centres, one search more than the peers do."""
    x, centres = inputs
    return lambda: kmeans(x, len(centres), init=centres, max_iter=ITERATIONS, tol=0.0).centres


def lloyd_scikit_learn(inputs: Inputs) -> Call:
    from sklearn.cluster import KMeans

    x, centres = inputs
    needs("cpu", x)
    rows, start = x.numpy(), centres.numpy()
    model = KMeans(len(start), init=start, n_init=1, max_iter=ITERATIONS, tol=0)
    return lambda: torch.from_numpy(model.fit(rows).cluster_centers_)


def lloyd_faiss(inputs: Inputs) -> Call:
    """All rows (it would draw 256 to a centroid), and no look at their values."""
    import faiss

    x, centres = inputs
    needs("cpu", x)
    faiss.omp_set_num_threads(torch.get_num_threads())
    rows, start = x.numpy(), centres.numpy()

    def call() -> torch.Tensor:
        points = {"min_points_per_centroid": 1, "max_points_per_centroid": len(rows)}
        model = faiss.Kmeans(rows.shape[1], len(start), niter=ITERATIONS, check_input_data_for_NaNs=False, **points)
        model.train(rows, init_centroids=start)
        return torch.from_numpy(model.centroids)

    return call


SMOKE = Clusters(400, 8, 5)
CASES = (Clusters(2000, 512, 64), Clusters(16000, 128, 128), Clusters(18000, 512, 64))


def _bytes(case: Clusters) -> int:
    """x once: what a fit with one iteration cannot avoid."""
    return 4 * case.n * case.d


OPS = {
    "kmeans": Op(
        cases=CASES,
        smoke=SMOKE,
        inputs=features,
        providers={"uefl": fit, "scikit-learn": fit_scikit_learn},
        gate=Gate("inertia above the mean of five seeds", limit=0.2, against=against_other_seeds),
        bytes=_bytes,
        flops=lambda case: 2 * case.n * case.d * case.k,  # the least: one iteration
    ),
    "kmeans_lloyd": Op(
        cases=(*CASES, Clusters(262144, 64, 256)),
        smoke=SMOKE,
        inputs=gaussian,
        providers={"uefl": lloyd, "scikit-learn": lloyd_scikit_learn, "faiss": lloyd_faiss},
        gate=Gate("relative error of inertia", limit=1e-4, against=against_float64),
        bytes=lambda case: ITERATIONS * _bytes(case),
        flops=lambda case: ITERATIONS * 2 * case.n * case.d * case.k,
        covers=("kmeans",),
    ),
}
