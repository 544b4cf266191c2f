"""Checks of the data cost at most 5 % of a pass over it, for each estimator method, op and layer.

Outside of the kernels, what torch and NumPy read and write is counted, so nothing is timed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uefl_kernels import (
    COMPILED,
    kmeans,
    kmeans_step,
    log_transition_probs,
    mc_dropout_mlp,
    rvq,
    set_proportion_loss,
    transition_nll,
    vq,
    vq_assign,
)
from uefl_kernels.estimator import KMeans
from uefl_kernels.estimator import kmeans as estimator
from uefl_kernels.nn import ResidualVQ, VectorQuantize

from .conftest import normal

ROWS, SHARE = 2000, 0.05


class Touched(TorchDispatchMode):
    """Count the elements that torch reads and writes outside of the kernels, except views."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        if not op.namespace.startswith("uefl") and not op.is_view:
            read = () if op._opname.startswith("new_") else (args, kwargs)  # only of the dtype
            tensors = [t for t in tree_leaves((read, found)) if isinstance(t, torch.Tensor)]
            self.elements += sum(t.numel() for t in tensors)
        return found


@pytest.fixture
def touched(monkeypatch):
    """Return a function of a call that counts the elements which torch and NumPy's tests touch."""
    counting = Touched()

    def counted(test):
        def run(x, *args, **kwargs):
            counting.elements += np.size(x)
            return test(x, *args, **kwargs)

        return run

    for name in ("isfinite", "isnan", "isinf"):
        monkeypatch.setattr(np, name, counted(getattr(np, name)))

    def count(call):
        counting.elements = 0
        with counting:
            call()
        return counting.elements

    return count


def rows(d, kind):
    x = normal(ROWS, d)
    return {"tensor": x, "float32": x.numpy(), "float64": x.double().numpy()}[kind]


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
@pytest.mark.parametrize("method", ["fit", "predict", "transform", "fit_predict", "score"])
@pytest.mark.parametrize("kind", ["tensor", "float32", "float64"])
@pytest.mark.parametrize("d", [784, 3072])
def test_estimators(d, kind, method, touched):
    x = rows(d, kind)
    model = KMeans(10, random_state=0, n_init=1, max_iter=3).fit(x)
    assert touched(lambda: getattr(model, method)(x)) <= SHARE * ROWS * d


OPS = {
    "vq_assign": vq_assign,
    "vq": vq,
    "rvq": lambda x, centers: rvq(x, [centers, centers]),
    "kmeans": lambda x, centers: kmeans(x, 2, max_iter=2),
    "kmeans_step": kmeans_step,
    "mc_dropout_mlp": lambda x, centers: mc_dropout_mlp(x, [centers, normal(3, 2)], p=0.5, passes=2),
    "log_transition_probs": lambda x, centers: log_transition_probs(x, log_matrix(centers)),
    "transition_nll": lambda x, centers: transition_nll(x, TARGETS, log_matrix(centers)),
    "set_proportion_loss": lambda x, centers: set_proportion_loss(
        x, torch.tensor([0, ROWS // 2, ROWS]), centers.softmax(1)
    ),
    "a layer": lambda x, centers: VectorQuantize(x.shape[1], 2)(x),
    "a layer in evaluation": lambda x, centers: VectorQuantize(x.shape[1], 2).eval()(x),
    "residual layers": lambda x, centers: ResidualVQ(dim=x.shape[1], num_quantizers=2, codebook_size=2)(x),
}
TARGETS = torch.arange(ROWS) % 2


def log_matrix(centers):
    return centers.log_softmax(0)


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("d", [784, 3072])
def test_ops(d, name, touched):
    x = rows(d, "tensor")
    assert touched(lambda: OPS[name](x, x[:2].clone())) <= SHARE * ROWS * d


@pytest.mark.parametrize(
    "check",
    [lambda x: torch.isfinite(torch.as_tensor(x)).all(), lambda x: np.isfinite(np.asarray(x)).all()],
    ids=["torch", "numpy"],
)
def test_a_check_of_all_rows_is_counted(check, touched, monkeypatch):
    """Show that the tests above can fail."""
    x = rows(784, "float32")
    model = KMeans(10, random_state=0, n_init=1, max_iter=3).fit(x)
    plain = estimator.KMeans._rows

    def checked(self, given, **options):
        assert check(given)
        return plain(self, given, **options)

    monkeypatch.setattr(estimator.KMeans, "_rows", checked)
    assert touched(lambda: model.predict(x)) >= x.size
