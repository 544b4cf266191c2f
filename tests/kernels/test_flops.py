"""FLOPs that torch.utils.flop_counter counts of the ops."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import uefl_kernels
from uefl_kernels import KMeans, _flops, _library, backend
from uefl_kernels.nn import MCDropout, ResidualVQ, VectorQuantize
from uefl_kernels.ops.kmeans_labels import kmeans_distances, kmeans_labels
from uefl_kernels.ops.lfq_entropy import lfq_entropy

from .conftest import normal

LINEAR = torch.ops.uefl.linear
ROWS = normal(60, 8).numpy()
FITTED = KMeans(5, random_state=0).fit(ROWS)


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


CASES = {
    "vq": (lambda: uefl_kernels.vq(normal(4, 50, 8), normal(16, 8)), 2 * 200 * 8 * 16),
    "vq of segments": (lambda: uefl_kernels.vq(normal(4, 50, 8), normal(2, 16, 4)), 2 * 400 * 4 * 16),
    "rvq": (
        lambda: uefl_kernels.rvq(normal(4, 50, 8), [normal(16, 8), normal(5, 8)]),
        2 * 200 * 8 * (16 + 5),
    ),
    "vq_assign": (lambda: uefl_kernels.vq_assign(normal(200, 8), normal(16, 8)), 2 * 200 * 8 * 16),
    "kmeans_step": (lambda: uefl_kernels.kmeans_step(normal(200, 8), normal(16, 8)), 2 * 200 * 8 * 16),
    "kmeans": (lambda: uefl_kernels.kmeans(normal(200, 8), 5, max_iter=3, n_init=1), 2 * 200 * 8 * 5 * 4),
    "mc_dropout_mlp": (
        lambda: uefl_kernels.mc_dropout_mlp(
            normal(6, 8), [normal(7, 8), normal(5, 7)], p=0.5, passes=3, input_dropout=True
        ),
        2 * 6 * 3 * (8 * 7 + 7 * 5),
    ),
    "log_transition_probs": (
        lambda: uefl_kernels.log_transition_probs(normal(6, 8), normal(3, 8).log_softmax(1)),
        2 * 6 * 8 * 3,
    ),
    "linear": (lambda: LINEAR(normal(6, 8), normal(3, 8), normal(3)), 2 * 6 * 8 * 3),
    "kmeans_labels": (lambda: kmeans_labels(normal(200, 8), normal(5, 8)), 2 * 200 * 8 * 5),
    "kmeans_distances": (lambda: kmeans_distances(normal(200, 8), normal(5, 8)), 2 * 200 * 8 * 5),
    "lfq_entropy": (lambda: lfq_entropy(normal(6, 2, 3)), 2 * 6 * 2 * 3 * 8),
    "predict": (lambda: FITTED.predict(ROWS), 2 * 60 * 8 * 5),
    "transform": (lambda: FITTED.transform(ROWS), 2 * 60 * 8 * 5),
    "score": (lambda: FITTED.score(ROWS), 2 * 60 * 8 * 5),
    "fit": (lambda: KMeans(5, init=ROWS[:5], n_init=1, max_iter=3).fit(ROWS), 2 * 60 * 8 * 5 * 4),
    "a layer": (lambda: VectorQuantize(8, 16)(normal(4, 50, 8)), 51_200),
    "a stack of layers": (
        lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16)(normal(4, 50, 8)),
        3 * 51_200,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", ["auto", "reference"])
def test_products_are_counted(name, where):
    run, expected = CASES[name]
    with backend(where):
        assert counted(run) == expected


def test_products_of_sparse_rows():
    """Only nonzero values are multiplied."""
    sparse = pytest.importorskip("scipy.sparse")
    rows = sparse.csr_matrix(np.where(ROWS > 0, ROWS, 0))
    one = 2 * rows.nnz * 5
    for method in (FITTED.predict, FITTED.transform, FITTED.score):
        assert counted(lambda method=method: method(rows)) == one
    fit = KMeans(5, init=ROWS[:5], n_init=1, max_iter=3)
    assert counted(lambda: fit.fit(rows)) == 4 * one


def test_every_op_with_products_has_a_formula():
    """The other ops work element by element, and move or sum rows."""
    elementwise = {
        "dropout_mask",
        "ema_update",
        "fsq",
        "fsq_backward",
        "kmeans_units",
        "set_proportion_loss",
        "transition_nll",
        "vq_backward",
    }
    assert set(_library._packages) == set(_flops._FORMULAS) | elementwise


def test_passes_of_a_chain():
    chain = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 5)
    )
    mc = MCDropout(chain, passes=10)
    assert counted(lambda: mc(normal(6, 8))) == 2 * 6 * 8 * 16 + 10 * 2 * 6 * 16 * 5


def test_gradients_of_passes():
    weights = [normal(7, 8).requires_grad_(), normal(5, 7).requires_grad_()]
    one = 2 * 6 * 3 * (8 * 7 + 7 * 5)

    def run():
        heads = uefl_kernels.mc_dropout_mlp(normal(6, 8), weights, p=0.5, passes=3, input_dropout=True)
        heads.entropy.sum().backward()

    assert counted(run) == 4 * one


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch.utils.flop_counter", "uefl_kernels.nn"])
def test_in_either_order_of_the_imports(first):
    second = {"torch.utils.flop_counter": "uefl_kernels.nn", "uefl_kernels.nn": "torch.utils.flop_counter"}[
        first
    ]
    code = (
        f"import torch, {first}, {second}\n"
        "with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:\n"
        "    uefl_kernels.vq(torch.zeros(10, 8), torch.ones(16, 8))\n"
        "print(counter.get_total_flops())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(2 * 10 * 8 * 16)]
