"""Values that count as integers in an argument."""

import numpy as np
import pytest
import torch

from uefl_kernels import COMPILED, KMeans, kmeans, kmeans_batched, mc_dropout_mlp, metrics
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


ARRAYS = [np.array([3]), np.array([3, 3]), torch.tensor([3]), torch.ones(2)]


@pytest.mark.parametrize(
    "value", [True, np.True_, torch.tensor(True), 3.0, np.float32(3), "3", None, [3], *ARRAYS]
)
def test_no_integers(value):
    assert as_integer(value) is None
    assert not is_count(value)


def test_counts():
    assert not is_count(0)
    assert not is_count(np.int64(-1))


def test_ops_and_layers_accept_numpy_numbers():
    x, weight = torch.randn(4, 5), [torch.randn(3, 5)]
    found = mc_dropout_mlp(x, weight, p=0.5, input_dropout=True, passes=np.int64(3), seed=np.uint8(7))
    assert all(
        map(torch.equal, found, mc_dropout_mlp(x, weight, p=0.5, input_dropout=True, passes=3, seed=7))
    )
    assert torch.equal(
        metrics.ece(found.mean_probs, torch.arange(4) % 3, Index()),
        metrics.ece(found.mean_probs, torch.arange(4) % 3, 3),
    )
    layer = VectorQuantize(
        dim=np.int64(6),
        codebook_size=Index(),
        codebook_dim=np.int32(4),
        heads=np.int64(2),
        kmeans_iters=np.int64(3),
    )
    assert layer.codebook.shape == (3, 4)
    assert type(layer.dim) is int
    assert len(ResidualVQ(dim=4, num_quantizers=np.int64(2), codebook_size=np.int64(8)).layers) == 2


def test_more_iterations_than_int64_can_count():
    x = torch.randn(30, 2)
    assert torch.equal(kmeans(x, 3, max_iter=10**30).labels, kmeans(x, 3, max_iter=10**9).labels)
    assert KMeans(3, init=x[:3], max_iter=10**30).fit(x).n_iter_ == KMeans(3, init=x[:3]).fit(x).n_iter_


@pytest.mark.parametrize(
    "three", [Index(), torch.tensor(3), np.int64(3)], ids=["__index__", "torch", "numpy"]
)
def test_kmeans_accepts_numpy_numbers(three):
    """Every front end takes NumPy's numbers for every int."""
    x = torch.randn(30, 2)

    def same(found, expected):
        assert all(map(torch.equal, found, expected))

    same(
        kmeans(x, three, n_init=three, max_iter=three, seed=three), kmeans(x, 3, n_init=3, max_iter=3, seed=3)
    )
    expected = kmeans_batched([x, x[:20]], [3, 3], init=[x[:3], x[3:6]], max_iter=3, seed=[3, 3])
    for given in (three, [three, three]):
        for found, one in zip(
            kmeans_batched([x, x[:20]], given, init=[x[:3], x[3:6]], max_iter=three, seed=given),
            expected,
            strict=True,
        ):
            same(found, one)
    found = KMeans(three, init=x[:3], n_init=three, max_iter=three, random_state=three).fit(x)
    assert torch.equal(found.labels_, KMeans(3, init=x[:3], max_iter=3, random_state=3).fit(x).labels_)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kmeans(x, torch.tensor([2])), "^kmeans: k .*int.*Tensor$"),
        (lambda x: kmeans_batched([x], torch.tensor(2.5)), r"^kmeans_batched: k .*tensor\(2\.5"),
        (lambda x: kmeans_batched([x, x], [1, 2.5]), r"^kmeans_batched: problem 1: k .*got 2\.5"),
        (lambda x: KMeans(np.array([2])).fit(x), r"n_clusters.*int.*array\(\[2\]\)"),
    ],
)
def test_kmeans_refuses_other_objects(call, message):
    with pytest.raises(TypeError, match=message):
        call(torch.randn(6, 2))


@pytest.mark.parametrize("fit", [kmeans, lambda x, k, n_init: KMeans(k, n_init=n_init).fit(x)])
def test_more_starts_than_int64_can_count_are_refused(fit):
    with pytest.raises(ValueError, match=r"^(kmeans|KMeans): n_init .*2\^63"):
        fit(torch.randn(6, 2), 2, n_init=2**63)


@pytest.mark.skipif(not COMPILED, reason="the NumPy front end needs the compiled kernels")
@pytest.mark.parametrize(
    "three", [Index(), torch.tensor(3), np.int64(3)], ids=["__index__", "torch", "numpy"]
)
def test_numpy_front_end_accepts_numpy_numbers(three):
    from uefl_kernels import numpy as front

    x = np.random.default_rng(0).normal(size=(30, 2))
    found = front.kmeans(x, three, n_init=three, max_iter=three, seed=three, threads=10**30)
    for one, other in zip(found, front.kmeans(x, 3, n_init=3, max_iter=3, seed=3), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(front.vq_assign(x, x[:5], threads=three), front.vq_assign(x, x[:5]))
