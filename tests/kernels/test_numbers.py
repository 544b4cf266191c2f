"""What counts as an integer in an argument."""

import numpy as np
import pytest
import torch

from uefl_kernels import mc_dropout_mlp, metrics
from uefl_kernels._numbers import as_integer, is_count
from uefl_kernels.nn import ResidualVQ, VectorQuantize


class Index:
    def __index__(self):
        return 3


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), Index()])
def test_integers(value):
    assert as_integer(value) == 3
    assert type(as_integer(value)) is int
    assert is_count(value)


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 3.0, np.float32(3), "3", None, [3], np.array([3, 3]), torch.ones(2)])
def test_no_integers(value):
    assert as_integer(value) is None
    assert not is_count(value)


def test_counts():
    assert not is_count(0)
    assert not is_count(np.int64(-1))


def test_ops_and_layers_take_them():
    x, weight = torch.randn(4, 5), [torch.randn(3, 5)]
    found = mc_dropout_mlp(x, weight, p=0.5, input_dropout=True, passes=np.int64(3), seed=np.uint8(7))
    assert all(map(torch.equal, found, mc_dropout_mlp(x, weight, p=0.5, input_dropout=True, passes=3, seed=7)))
    assert torch.equal(metrics.ece(found.mean_probs, torch.arange(4) % 3, Index()), metrics.ece(found.mean_probs, torch.arange(4) % 3, 3))
    layer = VectorQuantize(dim=np.int64(6), codebook_size=Index(), codebook_dim=np.int32(4), heads=np.int64(2), kmeans_iters=np.int64(3))
    assert layer.codebook.shape == (3, 4)
    assert type(layer.dim) is int
    assert len(ResidualVQ(dim=4, num_quantizers=np.int64(2), codebook_size=np.int64(8)).layers) == 2
