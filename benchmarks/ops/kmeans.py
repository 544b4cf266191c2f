"""Measure k-means: a whole fit with its seeding, Lloyd iterations from given centers, and one iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from uefl_kernels import kmeans, kmeans_step, vq_assign

from ..cases import BenchmarkCase, Call, Gate, Op, OpInputs, needs

ITERATIONS = 10  # of Lloyd; on Gaussian rows none of the cases has converged by then


@dataclass(frozen=True)
class Clusters(BenchmarkCase):
    """n rows of d elements, k clusters."""

    n: int
    d: int
    k: int


def features(case: Clusters, device: str) -> tuple[torch.Tensor, int]:
    """Return rows like the output of an encoder that ends in a ReLU: 40 loose groups, clipped at zero."""
    generator = torch.Generator().manual_seed(0)
    means = 0.6 * torch.randn(40, case.d, generator=generator)
    x = means[torch.randint(40, (case.n,), generator=generator)] + torch.randn(
        case.n, case.d, generator=generator
    )
    return x.relu().to(device), case.k


def gaussian(case: Clusters, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Gaussian rows and initial centers.

    The rows are the ones that fastkmeans draws with seed 0, because it takes no others.
    """
    x = torch.randn(case.n, case.d, generator=torch.Generator().manual_seed(0))
    first = torch.randperm(case.n, generator=torch.Generator().manual_seed(0))[: case.k]
    return x.to(device), x[first].to(device)


def inertia(x: torch.Tensor, centers: torch.Tensor) -> float:
    rows = x.split(1 << 14)
    return sum(
        float((block.double() - centers[vq_assign(block, centers)[:, 0]].double()).square().sum())
        for block in rows
    )


def against_other_seeds(inputs: OpInputs) -> Callable[[torch.Tensor], float]:
    """Return the relative difference of the inertia to the mean of ours over five seeds.

    Seeds differ by some percent.
    """
    x, k = inputs
    mean = sum(float(kmeans(x, k, seed=seed).inertia) for seed in range(5)) / 5
    return lambda centers: inertia(x, centers) / mean - 1


def against_float64(inputs: OpInputs, iterations: int = ITERATIONS) -> Callable[[torch.Tensor], float]:
    """Return the relative difference to the inertia of plain float64 iterations."""
    x, centers = inputs[0], inputs[1].double()
    for _ in range(iterations):
        sums, counts = torch.zeros_like(centers), centers.new_zeros(len(centers))
        for block in x.double().split(1 << 12):
            labels = torch.cdist(block, centers).argmin(1)
            sums.index_add_(0, labels, block)
            counts.index_add_(0, labels, torch.ones_like(block[:, 0]))
        centers = torch.where(counts[:, None] > 0, sums / counts[:, None], centers)
    truth = inertia(x, centers)
    return lambda found: abs(inertia(x, found) / truth - 1)


def fit(inputs: OpInputs) -> Call:
    x, k = inputs
    return lambda: kmeans(x, k).centers


def fit_scikit_learn(inputs: OpInputs) -> Call:
    """Fit with the defaults: greedy k-means++, one start, Lloyd."""
    from sklearn.cluster import KMeans

    x, k = inputs
    needs("cpu", x)
    rows = x.numpy()
    return lambda: torch.from_numpy(KMeans(k, random_state=0, n_init="auto").fit(rows).cluster_centers_)


def lloyd(inputs: OpInputs) -> Call:
    """Return labels and inertia for the last centers, which takes one search more than the peers do."""
    x, centers = inputs
    return lambda: kmeans(x, len(centers), init=centers, max_iter=ITERATIONS, tol=0.0).centers


def lloyd_scikit_learn(inputs: OpInputs) -> Call:
    from sklearn.cluster import KMeans

    x, centers = inputs
    needs("cpu", x)
    rows, start = x.numpy(), centers.numpy()
    model = KMeans(len(start), init=start, n_init=1, max_iter=ITERATIONS, tol=0)
    return lambda: torch.from_numpy(model.fit(rows).cluster_centers_)


def lloyd_faiss(inputs: OpInputs, iterations: int = ITERATIONS) -> Call:
    """Train on all rows (the default draws 256 per center) without a check of their values."""
    import faiss

    x, centers = inputs
    needs("cpu", x)
    faiss.omp_set_num_threads(torch.get_num_threads())
    rows, start = x.numpy(), centers.numpy()

    def call() -> torch.Tensor:
        points = {"min_points_per_centroid": 1, "max_points_per_centroid": len(rows)}
        model = faiss.Kmeans(
            rows.shape[1], len(start), niter=iterations, check_input_data_for_NaNs=False, **points
        )
        model.train(rows, init_centroids=start)
        return torch.from_numpy(model.centroids)

    return call


def lloyd_fastkmeans(inputs: OpInputs) -> Call:
    """Use blocks with 4 MB of distances instead of 51,200 rows.

    The peer draws the initial centers of ``gaussian``.
    """
    from fastkmeans import FastKMeans

    x, centers = inputs
    needs("cpu", x)
    rows, k = x.numpy(), len(centers)
    model = FastKMeans(
        rows.shape[1],
        k,
        niter=ITERATIONS,
        tol=0.0,
        gpu=False,
        seed=0,
        chunk_size_data=max(256, (1 << 20) // k),
    )

    def call() -> torch.Tensor:
        with torch.random.fork_rng(devices=()):  # it seeds torch
            return torch.from_numpy(model.fit(rows).centroids)

    return call


def lloyd_flash_kmeans(inputs: OpInputs, iterations: int = ITERATIONS) -> Call:
    """Run the peer's Triton kernels with its own tuning tables.

    Every call of it begins with the norms of x.
    """
    from flash_kmeans import batch_kmeans_Euclid

    x, centers = inputs
    needs("cuda", x)
    settings = {"max_iters": iterations, "tol": 0.0, "init_centroids": centers[None]}
    return lambda: batch_kmeans_Euclid(x[None], len(centers), **settings)[1][0]


def lloyd_superkmeans(inputs: OpInputs) -> Call:
    """Run all iterations on all rows.

    The peer chooses its own initial rows, so its inertia differs (column ``error``).
    """
    from superkmeans import SuperKMeans

    x, centers = inputs
    needs("cpu", x)
    rows = x.numpy()
    settings = {
        "hierarchical": False,
        "iters": ITERATIONS,
        "sampling_fraction": 1.0,
        "tol": 0.0,
        "early_termination": False,
    }

    def call() -> torch.Tensor:
        return torch.from_numpy(
            SuperKMeans(*centers.shape, n_threads=torch.get_num_threads(), **settings).train(rows)
        )

    return call


def step(inputs: OpInputs) -> Call:
    """Run a step in the units of an earlier step, like every later iteration of a loop.

    The step returns the inertia, which the peers leave out.
    """
    x, centers = inputs
    units = kmeans_step(x, centers).units
    return lambda: kmeans_step(x, centers, units=units).centers


def step_eager(inputs: OpInputs) -> Call:
    """Run the fastest search of torch that we know (``addmm`` as in ``vq_assign``), then ``index_add_``."""
    x, centers = inputs
    k = len(centers)
    blocks = x.split(max(256, (1 << 20) // k)) if x.device.type == "cpu" else x.split(1 << 18)

    def call() -> torch.Tensor:
        half_norms, sums, counts = (
            centers.square().sum(1) / 2,
            torch.zeros_like(centers),
            centers.new_zeros(k),
        )
        for block in blocks:
            labels = torch.addmm(half_norms, block, centers.T, alpha=-1).min(1).indices
            sums.index_add_(0, labels, block)
            counts += torch.bincount(labels, minlength=k)
        return torch.where(counts[:, None] > 0, sums / counts[:, None], centers)

    return call


SMOKE = Clusters(400, 8, 5)
CASES = (Clusters(2000, 512, 64), Clusters(16000, 128, 128), Clusters(18000, 512, 64))


def _bytes(case: Clusters) -> int:
    """Count one reading of x, which every fit needs."""
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
        cuda_cases=(*CASES, Clusters(1 << 20, 64, 256)),
        smoke=SMOKE,
        inputs=gaussian,
        providers={
            "uefl": lloyd,
            "scikit-learn": lloyd_scikit_learn,
            "faiss-cpu": lloyd_faiss,
            "superkmeans": lloyd_superkmeans,
            "fastkmeans": lloyd_fastkmeans,
            "flash-kmeans": lloyd_flash_kmeans,
        },
        gate=Gate("relative error of inertia", limit=1e-4, against=against_float64),
        bytes=lambda case: ITERATIONS * _bytes(case),
        flops=lambda case: ITERATIONS * 2 * case.n * case.d * case.k,
        covers=("kmeans",),
    ),
    "kmeans_step": Op(
        cases=(Clusters(18000, 512, 64), Clusters(262144, 64, 256)),
        cuda_cases=(Clusters(1 << 20, 64, 256),),
        smoke=SMOKE,
        inputs=gaussian,
        providers={
            "uefl": step,
            "eager": step_eager,
            "faiss-cpu": partial(lloyd_faiss, iterations=1),
            "flash-kmeans": partial(lloyd_flash_kmeans, iterations=1),
        },
        gate=Gate("relative error of inertia", limit=1e-6, against=partial(against_float64, iterations=1)),
        bytes=_bytes,
        flops=lambda case: 2 * case.n * case.d * case.k,
        covers=("kmeans_units",),
    ),
}
