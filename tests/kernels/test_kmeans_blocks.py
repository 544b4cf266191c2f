"""Fits in blocks or in several processes, and ``partial_fit``, equal a fit in memory bit for bit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uefl_kernels import KMeans, backend
from uefl_kernels.estimator import _data as data

from .conftest import normal

ATTRIBUTES = ("cluster_centers_", "labels_", "counts_", "inertia_", "n_iter_")
DATA = np.random.default_rng(0).standard_normal((500, 6)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).random(500) * (np.arange(500) % 7 > 0)

OPTIONS = {
    "k-means++": {},
    "k-means||": {"init": "k-means||"},
    "random": {"init": "random", "n_init": 3},
    "given": {"init": DATA[:9]},
    "cosine": {"metric": "cosine"},
    "cosine, k-means||": {"metric": "cosine", "init": "k-means||", "n_init": 2},
    "no tol": {"tol": 0.0, "max_iter": 7},
    "empty clusters": {"init": np.concatenate([DATA[:4], np.full((5, 6), 50.0) + np.arange(5)[:, None]])},
}


def equal(one, other, labels=slice(None)):
    for name in ATTRIBUTES:
        a, b = getattr(one, name), getattr(other, name)
        if name == "labels_":
            b = b[labels]
        assert np.array_equal(np.asarray(a), np.asarray(b)), name
        assert np.asarray(a).dtype == np.asarray(b).dtype, name


def cut(x, *where):
    return [x[a:b] for a, b in zip((0, *where), (*where, len(x)), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weights"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("case", OPTIONS)
def test_blocks_give_the_bits_of_memory(case, dtype, weights):
    x = DATA.astype(dtype)
    model = KMeans(9, random_state=3, **OPTIONS[case])
    expected = KMeans(9, random_state=3, **OPTIONS[case]).fit(x, sample_weight=weights)
    for blocks in (cut(x, 100, 101, 480), [x], lambda: iter(cut(x, 13, 13, 200))):
        equal(model.fit_blocks(blocks, sample_weight=weights), expected)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    n=st.integers(1, 60),
    d=st.integers(1, 5),
    k=st.integers(1, 9),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    init=st.sampled_from(["k-means++", "k-means||", "random"]),
    metric=st.sampled_from(["l2", "cosine"]),
    spread=st.sampled_from([1.0, 0.3]),
)
@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_blocks_of_anything(n, d, k, seed, cuts, init, metric, spread):
    """The rows have duplicates, and some clusters are empty."""
    x = (normal(n, d, seed=seed) / spread).round().numpy()
    model = KMeans(min(n, k), init=init, metric=metric, random_state=seed)
    expected = KMeans(min(n, k), init=init, metric=metric, random_state=seed).fit(x)
    equal(model.fit_blocks(cut(x, *sorted(min(c, n) for c in cuts))), expected)


def test_blocks_on_the_reference():
    expected = KMeans(5, random_state=0).fit(DATA)
    with backend("reference"):
        equal(KMeans(5, random_state=0).fit_blocks(cut(DATA, 99)), expected)


@pytest.mark.parametrize("init", ["k-means++", "k-means||", "random"])
def test_seeds_of_length_one_are_scaled_once(init):
    """Short rows tie, so one unit in the last place of a seed changes the result."""
    rng = np.random.default_rng(0)
    x = rng.random((400, 60)) * (rng.random((400, 60)) < 0.05)
    expected = KMeans(9, init=init, metric="cosine", random_state=3).fit(x)
    equal(KMeans(9, init=init, metric="cosine", random_state=3).fit_blocks([x]), expected)
    with backend("reference"):
        equal(KMeans(9, init=init, metric="cosine", random_state=3).fit(x), expected)


def test_tensors_in_blocks():
    equal(
        KMeans(5, random_state=0).fit_blocks(list(torch.from_numpy(DATA).split(70))),
        KMeans(5, random_state=0).fit(DATA),
    )


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i2"])
def test_a_file_is_read_in_blocks(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("uefl_kernels.estimator._data._BLOCK_BYTES", 8 * 6 * 64)
    x = (DATA * 10).astype(dtype)
    x.tofile(tmp_path / "x")
    file = np.memmap(tmp_path / "x", dtype, "r", shape=x.shape)
    expected = KMeans(7, random_state=0).fit(x, sample_weight=WEIGHTS)
    monkeypatch.setattr("uefl_kernels.estimator.kmeans.kmeans", None)
    model = KMeans(7, random_state=0).fit(file, sample_weight=WEIGHTS)
    equal(model, expected)
    assert np.array_equal(model.predict(file), expected.predict(x))
    assert np.array_equal(model.transform(file), expected.transform(x))
    assert model.score(file, sample_weight=WEIGHTS) == pytest.approx(expected.score(x, sample_weight=WEIGHTS))
    with pytest.raises(ValueError, match=r"X .*3 features.*KMeans.*6"):
        model.predict(np.memmap(tmp_path / "x", dtype, "r", shape=(4, 3)))


def test_no_block_of_a_file_is_large(tmp_path, monkeypatch):
    """Temporary arrays have few rows."""
    seen = []
    rows_of = data.rows_of
    monkeypatch.setattr(data, "_BLOCK_BYTES", 8 * 6 * 64)
    monkeypatch.setattr(
        data, "rows_of", lambda name, X, **options: seen.append(len(X)) or rows_of(name, X, **options)
    )
    file = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2000, 6))
    file[:500] = DATA
    model = KMeans(4, random_state=0).fit(file)
    model.predict(file)
    model.transform(file)
    assert max(seen) == 64
    assert sum(seen) > 3 * 2000


MEMORY = """
import json, sys, threading
import numpy as np
from uefl_kernels import KMeans
from uefl_kernels.estimator import _data as data

def anonymous():  # memory of this process that is not a page of a file, in bytes
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watched(call):
    most, done = anonymous(), threading.Event()
    def watch():
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous())
    before, thread = most, threading.Thread(target=watch)
    thread.start()
    result = call()
    done.set()
    thread.join()
    return result, most - before

data._BLOCK_BYTES = 1 << 22
file = np.memmap(sys.argv[1], np.float32, "r", shape=(1 << 17, 512))
blocks = lambda: (np.array(file[i : i + 1024]) for i in range(0, len(file), 1024))
model = lambda: KMeans(4, random_state=0, max_iter=3, tol=0)
model().fit(file[:1000])  # allocates the memory that later fits reuse
mapped, of_file = watched(lambda: model().fit(file))
given, of_blocks = watched(lambda: model().fit_blocks(blocks))
whole, of_memory = watched(lambda: model().fit(np.array(file)))
same = all(
    np.array_equal(a.cluster_centers_, whole.cluster_centers_) and np.array_equal(a.labels_, whole.labels_)
    for a in (mapped, given)
)
print(json.dumps([file.nbytes, of_file, of_blocks, of_memory, same]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_memory_does_not_grow_with_the_data(tmp_path):
    """A fit of 256 MB from a file or in blocks takes less than a quarter of the memory.

    A fit in memory takes all of it.
    """
    rows = np.random.default_rng(0).standard_normal((1 << 12, 512), np.float32)
    with open(tmp_path / "x", "wb") as file:
        for i in range(32):
            (rows + i % 4).tofile(file)
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path / "x"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, of_file, of_blocks, of_memory, same = json.loads(done.stdout)
    assert same
    assert max(of_file, of_blocks) < size / 4
    assert of_memory > size * 0.9


def test_sparse_rows_are_made_dense_in_blocks(monkeypatch):
    sparse = pytest.importorskip("scipy.sparse")
    monkeypatch.setattr("uefl_kernels.estimator._data._BLOCK_BYTES", 8 * 6 * 64)
    x = DATA * (np.abs(DATA) > 1)
    expected = KMeans(5, random_state=0).fit(x)
    for form in (sparse.csr_array, sparse.csc_matrix, sparse.coo_array):
        model = KMeans(5, random_state=0).fit(form(x))
        equal(model, expected)
        assert np.array_equal(model.predict(form(x)), expected.labels_)
        assert np.array_equal(model.transform(form(x)), expected.transform(x))


class Shrinking:
    """Blocks that have one row less in every pass."""

    left = 40

    def __iter__(self):
        self.left -= 1
        return iter([DATA[: self.left]])


REFUSED = {
    "an iterator": (lambda: iter([DATA]), TypeError, "^KMeans: blocks.*list_iterator"),
    "a number": (lambda: 5, TypeError, "^KMeans: blocks .*int,"),
    "nothing": (lambda: [], ValueError, "^KMeans: .*blocks.*rows;"),
    "widths": (lambda: [DATA, DATA[:, :2]], ValueError, "^KMeans: .*blocks.*width.*dtype"),
    "dtypes": (lambda: [DATA, DATA.astype(float)], ValueError, "^KMeans: .*blocks.*width.*dtype"),
    "changing": (Shrinking, ValueError, r"^KMeans: .*blocks.* \d+ rows.* \d+"),
    "NaN": (lambda: [DATA, DATA * np.nan], ValueError, "^KMeans: X .*NaN"),
    "too few": (lambda: [DATA[:1]], ValueError, "^n_samples=1 .*n_clusters=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    blocks, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        KMeans(2).fit_blocks(blocks())
    with pytest.raises(ValueError, match=r"^KMeans: weights.*\[500\].*\[3\]"):
        KMeans(2).fit_blocks([DATA], sample_weight=np.ones(3))


def _process(rank: int, rendezvous: str, results: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    group = torch.distributed.group.WORLD
    piece = (slice(0, 200), slice(200, 210), slice(210, 500))[rank]
    found = {}
    for case, options in OPTIONS.items():
        for weights in (None, WEIGHTS):
            model = KMeans(9, random_state=3, **options)
            mass = None if weights is None else weights[piece]
            model.fit_blocks(cut(DATA[piece], 4), sample_weight=mass, group=group)
            found[case, weights is None] = {name: getattr(model, name) for name in ATTRIBUTES}
    torch.manual_seed(rank)
    found["drawn"] = KMeans(3).fit_blocks([DATA[piece]], group=group).cluster_centers_
    refused = []
    for call in (
        lambda: KMeans(3 + rank).fit_blocks([DATA[piece]], group=group),
        lambda: KMeans(3).fit_blocks([DATA[piece, : 4 + rank]], group=group),
        lambda: KMeans(3).fit_blocks([DATA[piece] * (np.nan if rank == 1 else 1)], group=group),
    ):
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        refused.append(f"{error.type.__name__}: {error.value}")
    torch.save((found, refused), f"{results}/{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_several_processes_give_the_bits_of_one(tmp_path):
    torch.multiprocessing.spawn(_process, (str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=3)
    results = [torch.load(tmp_path / str(rank), weights_only=False) for rank in range(3)]
    for case, options in OPTIONS.items():
        for weights in (None, WEIGHTS):
            expected = KMeans(9, random_state=3, **options).fit(DATA, sample_weight=weights)
            found = [result[0][case, weights is None] for result in results]
            assert np.array_equal(np.concatenate([piece["labels_"] for piece in found]), expected.labels_)
            for piece in found:
                for name in ATTRIBUTES[:1] + ATTRIBUTES[2:]:
                    assert np.array_equal(piece[name], getattr(expected, name)), (case, name)
    assert np.array_equal(results[0][0]["drawn"], results[2][0]["drawn"])
    for refused, broken in ((results[0][1], "process 1 "), (results[1][1], "^ValueError: KMeans: X .*NaN")):
        for pattern, message in zip(
            ("^ValueError: .*asked", "^ValueError: .*dtype", broken), refused, strict=True
        ):
            assert re.search(pattern, message)


def test_partial_fit_keeps_the_mean_of_all_rows():
    first, *later = np.split(DATA.astype(np.float64), 5)
    model = KMeans(4, random_state=0).partial_fit(first)
    expected = KMeans(4, random_state=0).fit(first)
    equal(model, expected)
    sums, counts = expected.cluster_centers_ * expected.counts_[:, None], expected.counts_.copy()
    for rows in later:
        labels = model.predict(rows)
        np.add.at(sums, labels, rows)
        np.add.at(counts, labels, 1)
        model.partial_fit(rows)
        np.testing.assert_allclose(model.cluster_centers_, sums / counts[:, None], rtol=1e-12)
        assert np.array_equal(model.counts_, counts)
        assert np.array_equal(model.labels_, model.predict(rows))
        assert model.inertia_ == pytest.approx(-model.score(rows))
    assert model.counts_.sum() == 500


def test_partial_fit_with_weights_dtypes_and_cosine():
    weights = np.arange(100.0)
    for metric in ("l2", "cosine"):
        for x in (DATA, torch.from_numpy(DATA)):
            model = KMeans(4, random_state=0, metric=metric).partial_fit(x[:100], sample_weight=weights)
            model.partial_fit(x[100:200], sample_weight=weights)
            assert float(model.counts_.sum()) == 2 * weights.sum()
            assert type(model.cluster_centers_) is type(x)
            assert model.cluster_centers_.dtype == x.dtype
    np.testing.assert_allclose(np.linalg.norm(model.cluster_centers_.numpy(), axis=1), 1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^KMeans: X .*NaN"):
        model.partial_fit(x * float("nan"))
    with pytest.raises(ValueError, match=r"X .*2 features.*KMeans.*6"):
        model.partial_fit(x[:, :2])
