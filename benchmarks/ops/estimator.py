"""Compare each method of ``KMeans`` with scikit-learn's, on arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from uefl_kernels import KMeans

from ..cases import BenchmarkCase, Call, Gate, Op, needs
from .kmeans import ITERATIONS, against_float64

METHODS = ("fit", "fit_predict", "predict", "transform", "score")
OpInputs = tuple[str, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method(BenchmarkCase):
    """A method on n rows of d elements with k clusters."""

    method: str
    n: int
    d: int
    k: int


def inputs(case: Method, device: str) -> OpInputs:
    """Return Gaussian rows, the first of which are the initial centers."""
    x = torch.randn(case.n, case.d, generator=torch.Generator().manual_seed(0)).to(device)
    return case.method, x, x[: case.k].clone()


def method_call(kind: Any, method: str, rows: Any, centers: np.ndarray) -> Call:
    """Prepare a method of an estimator, such as ``KMeans``, on rows.

    ``fit`` and ``fit_predict`` are whole fits; the other methods use a model of two iterations.
    """
    fitting = method.startswith("fit")
    model: Any = kind(len(centers), init=centers, n_init=1, max_iter=ITERATIONS if fitting else 2, tol=0)
    if not fitting:
        model.fit(rows)
    call = getattr(model, method)

    def answer() -> tuple[Any, Any]:
        found = call(rows)
        return (found if method != "fit" else model.labels_), model.cluster_centers_

    return answer


def _call(kind: Any, inputs: OpInputs) -> Call:
    method, x, centers = inputs
    needs("cpu", x)
    return method_call(kind, method, x.numpy(), centers.numpy())


def ours(inputs: OpInputs) -> Call:
    return _call(KMeans, inputs)


def scikit_learn(inputs: OpInputs) -> Call:
    """Return Lloyd's algorithm from the same centers, on arrays."""
    from sklearn.cluster import KMeans as Peer

    return _call(Peer, inputs)


def against(inputs: OpInputs) -> Callable[[tuple[Any, Any]], float]:
    """Return the error of an answer.

    After a fit it is the error of the inertia, else the error of the answer for the model's own centers.
    """
    method, x, centers = inputs
    if method.startswith("fit"):
        relative = against_float64((x, centers))
        return lambda found: relative(torch.from_numpy(np.asarray(found[1])))

    def error(found: tuple[Any, Any]) -> float:
        answer, codebook = found
        truth = torch.cat(
            [
                torch.cdist(
                    block, torch.from_numpy(codebook).double(), compute_mode="donot_use_mm_for_euclid_dist"
                )
                for block in x.double().split(4096)
            ]
        )
        if method == "predict":
            return float((truth.argmin(1).numpy() != answer).sum())
        if method == "transform":
            return float((torch.from_numpy(answer) / truth - 1).abs().max())
        return abs(float(answer) / -float(truth.amin(1).square().sum()) - 1)

    return error


OPS = {
    "estimator": Op(
        cases=(
            *(Method(method, n, d, 10) for n, d in ((20000, 784), (5000, 3072)) for method in METHODS),
            *(Method("fit", n, d, 8) for n, d in ((100, 100000), (60, 20000), (200000, 2))),
            *(Method("fit", n, d, k) for n, d, k in ((100, 100000, 32), (60, 20000, 32), (60, 20000, 48))),
        ),
        cuda_cases=(),
        smoke=Method("predict", 400, 8, 5),
        inputs=inputs,
        providers={"uefl": ours, "scikit-learn": scikit_learn},
        gate=Gate("wrong rows, or relative error", limit=1e-5, against=against),
        bytes=lambda case: 4 * case.n * case.d,  # x once
        flops=lambda case: (
            2 * case.n * case.d * case.k * (ITERATIONS if case.method.startswith("fit") else 1)
        ),
        covers=("kmeans_labels", "kmeans_distances"),
    )
}
