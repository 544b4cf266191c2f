"""Compare each method of ``KMeans`` with scikit-learn's, on sparse matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from uefl_kernels import KMeans

from ..cases import BenchmarkCase, Call, Gate, Op, ProviderUnavailable
from .estimator import method_call
from .kmeans import ITERATIONS, against_float64

METHODS = ("fit", "predict", "transform", "score")
OpInputs = tuple[str, Any, Any]


@dataclass(frozen=True)
class SparseMethod(BenchmarkCase):
    """A method on n rows of d elements with k clusters.

    ``nonzeros`` is their mean number in a row.
    """

    method: str
    n: int
    d: int
    k: int
    nonzeros: int


def inputs(case: SparseMethod, device: str) -> OpInputs:
    """Return a CSR matrix of rows of length 1, like TF-IDF.

    The first rows are the initial centers.
    """
    from scipy.sparse import random_array

    if device != "cpu":
        raise ProviderUnavailable("sparse matrices are clustered on the CPU")
    rng = np.random.default_rng(0)
    rows = random_array((case.n, case.d), density=case.nonzeros / case.d, rng=rng, format="csr")
    rows.data /= np.sqrt(rows.power(2).sum(1)).repeat(np.diff(rows.indptr))
    return case.method, rows, rows[: case.k].toarray()


def ours(inputs: OpInputs) -> Call:
    return method_call(KMeans, *inputs)


def scikit_learn(inputs: OpInputs) -> Call:
    """Return Lloyd's algorithm from the same centers, on the same matrix."""
    from sklearn.cluster import KMeans as Peer

    return method_call(Peer, *inputs)


def against(inputs: OpInputs) -> Callable[[tuple[Any, Any]], float]:
    """Return a function that computes the error of an answer.

    After a fit it is the error of the inertia, after other methods the error of the answer for the model's
    own centers.
    """
    method, rows, centers = inputs
    if method == "fit":
        relative = against_float64((torch.from_numpy(rows.toarray()), torch.from_numpy(centers)))
        return lambda found: relative(torch.from_numpy(np.asarray(found[1])))

    def error(found: tuple[Any, Any]) -> float:
        answer, codebook = found
        blocks = (torch.from_numpy(rows[i : i + 500].toarray()) for i in range(0, rows.shape[0], 500))
        exactly = {"compute_mode": "donot_use_mm_for_euclid_dist"}
        truth = torch.cat([torch.cdist(block, torch.from_numpy(codebook), **exactly) for block in blocks])
        if method == "predict":
            return float((truth.argmin(1).numpy() != answer).sum())
        if method == "transform":
            return float((torch.from_numpy(answer) / truth - 1).nan_to_num(0).abs().max())
        return abs(float(answer) / -float(truth.amin(1).square().sum()) - 1)

    return error


SHAPES = ((10000, 20000, 8, 100), (10000, 20000, 64, 100), (50000, 1000, 8, 20), (50000, 1000, 64, 20))
OPS = {
    "estimator_sparse": Op(
        cases=tuple(SparseMethod(method, *shape) for shape in SHAPES for method in METHODS),
        cuda_cases=(),
        smoke=SparseMethod("predict", 400, 30, 5, 4),
        inputs=inputs,
        providers={"uefl": ours, "scikit-learn": scikit_learn},
        gate=Gate("wrong rows, or relative error", limit=1e-5, against=against),
        bytes=lambda case: 12 * case.n * case.nonzeros,  # values and columns once
        flops=lambda case: 2 * case.n * case.nonzeros * case.k * (ITERATIONS if case.method == "fit" else 1),
        covers=("kmeans_sparse", "kmeans_sparse_labels", "kmeans_sparse_distances", "kmeans_sparse_products"),
    )
}
