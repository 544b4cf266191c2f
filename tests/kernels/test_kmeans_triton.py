"""The Triton kernels before and after the steps of ``kmeans`` equal the reference.

They are interpreted, and compiled for three generations of GPU.

``tests/conftest.py`` has imported Triton for interpretation. With a GPU, ``test_cuda.py`` runs the kernels
natively instead.
"""

import pytest
import torch

from uefl_kernels import backend, kmeans
from uefl_kernels._dtypes import result_dtype
from uefl_kernels.ops.kmeans import composed
from uefl_kernels.ops.kmeans_step import composed as steps

from . import ahead
from .conftest import normal

if torch.cuda.is_available():
    pytest.skip("the kernels run natively here (test_cuda.py)", allow_module_level=True)
pytest.importorskip("triton")

from uefl_kernels.ops.kmeans import triton, triton_seeding


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def after(module, x, centers, weights, spherical, ended=False, limit=0.0):
    """Return the state after one iteration."""
    data = composed.Problem(x, weights, composed.Grid)
    state = composed.FitState(centers.clone(), torch.tensor(ended), torch.tensor(3))
    module.advance(
        data,
        state,
        torch.tensor(limit, dtype=torch.float64),
        data.step(torch.ops.uefl_reference.kmeans_step, centers, False),
        spherical,
    )
    return state


def assert_same_advance(*arguments, **options):
    found, expected = (after(module, *arguments, **options) for module in (triton, composed))
    for name, one, other in zip(found._fields, found, expected, strict=True):
        assert torch.equal(one, other), name
    return found


@pytest.mark.parametrize(
    ("dtype", "spherical"),
    [(torch.float32, False), (torch.float32, True), (torch.float64, True), (torch.half, False)],
)
def test_advance_equals_the_reference(dtype, spherical):
    """The cases include more empty clusters than rows to fill them, and rows of weight zero."""
    for n, d, k, far in ((1, 1, 1, 0), (70, 9, 5, 2), (3, 2, 6, 5)):
        x = normal(n, d, seed=n).to(dtype)
        centers = normal(k, d, seed=k, dtype=result_dtype(x))
        centers[len(centers) - far :] += 1000 + torch.arange(far)[:, None]  # empty
        rows = composed.unit_rows(x.to(centers.dtype)) if spherical else x
        assert_same_advance(rows, centers, None, spherical)
        assert_same_advance(
            rows.T.contiguous().T, centers, (torch.arange(n) % 3).double() + (n == 1), spherical, limit=1e9
        )


def test_an_iteration_after_the_end_changes_nothing():
    x, centers = normal(50, 3), torch.cat([normal(2, 3, seed=1), torch.full((1, 3), 1e4)])
    state = assert_same_advance(x, centers, None, False, ended=True)
    assert torch.equal(state.centers, centers)
    assert int(state.iterations) == 3
    assert bool(assert_same_advance(x, centers, None, False, limit=1e9).ended)
    assert not bool(assert_same_advance(x, centers, None, False).ended)
    assert bool(assert_same_advance(x, centers, None, False, limit=float("nan")).ended)


def test_moves_are_added_up_in_one_order(monkeypatch):
    """With many clusters torch computes the sums, with few clusters a kernel."""
    x, centers = normal(60, 2, dtype=torch.float64), normal(33, 2, seed=1, dtype=torch.float64)
    data = composed.Problem(x, None, composed.Grid)
    moved = composed.update(
        data, centers, *data.step(torch.ops.uefl_reference.kmeans_step, centers, False)[:3], False
    )
    shift = float(steps.tree_sum(steps.square_norms(moved - centers)))
    below = float(torch.tensor(shift, dtype=torch.float64).nextafter(torch.tensor(0.0, dtype=torch.float64)))
    for tree in (4096, 32):
        monkeypatch.setattr(triton, "_TREE", tree)
        assert bool(assert_same_advance(x, centers, None, False, limit=shift).ended)
        assert not bool(assert_same_advance(x, centers, None, False, limit=below).ended)


@pytest.mark.parametrize("method", ["k-means++", "k-means||", "random"])
def test_the_same_rows_are_drawn_as_by_the_reference(method, monkeypatch):
    """The cases have several blocks, zero weights, fewer distinct rows than clusters, and a single row."""
    monkeypatch.setattr(triton_seeding, "_BLOCK", 64)
    monkeypatch.setattr(triton_seeding, "_SUMS", 1)
    weights = torch.rand(80, dtype=torch.float64) * (torch.arange(80) % 3 > 0)
    for rows, mass, k, seed in (
        (normal(80, 37), weights / weights.max(), 3, 2**40 + 3),
        (normal(3, 2)[torch.arange(70) % 3], None, 4, -7),
        (normal(1, 1), None, 1, 0),
    ):
        expected, found = (
            composed.Problem(rows, mass, grid).grid.seeds(method, k, seed, 1)
            for grid in (composed.Grid, triton_seeding.TritonGrid)
        )
        assert torch.equal(found, expected), (len(rows), found, expected)


def test_potentials_are_compared_as_whole_numbers(monkeypatch):
    """Of equally good candidates the first is taken.

    Rows at opposite edges of the grid do not overflow.
    """
    monkeypatch.setattr(triton_seeding, "_BLOCK", 64)
    x = torch.tensor([-1.0, 1.0]).repeat(40)[:, None] * torch.ones(1, 70)
    expected, found = (
        composed.Problem(x, None, grid).grid.seeds("k-means++", 3, 0, 0)
        for grid in (composed.Grid, triton_seeding.TritonGrid)
    )
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_fit_equals_the_cpu():
    x, weights = normal(70, 5), torch.rand(70)
    far = torch.cat([x[:2], torch.full((2, 5), 100.0) + torch.arange(2)[:, None]])
    for options in (
        {"max_iter": 3},
        {"weights": weights, "init": far, "metric": "cosine"},
        {"init": "k-means||", "max_iter": 2},
    ):
        expected = kmeans(x, 4, **options)
        with backend("triton"):
            found = kmeans(x, 4, **options)
        for name, one, other in zip(found._fields, found, expected, strict=True):
            assert torch.equal(one, other), name


COMPILE = """
import json
from tests.kernels.ahead import build
import uefl_kernels.ops.kmeans.triton as kernels
import uefl_kernels.ops.kmeans.triton_seeding as seeding

DOUBLES = {"units", "weights", "middle", "scale", "mass_scale", "moves", "limit"}
WHOLE = {"labels", "sums", "masses", "keys", "taken", "iterations", "nearest", "left", "left_sums", "drawn",
         "potentials", "chosen", "owner"}
report = []
for name, x, centers, spherical in (
    ("_far", "*fp32", "*fp32", False), ("_far", "*fp64", "*fp64", False), ("_fill", None, None, False),
    ("_move", "*bf16", "*fp32", False), ("_move", "*fp32", "*fp32", True),
    ("_end_iteration", None, None, False), ("_draw", None, None, False), ("_compare", None, None, False),
    ("_take", None, None, False), ("_improve", None, None, False),
):
    kernel = getattr(kernels, name, None) or getattr(seeding, name)
    constants = {"WEIGHTED": True, "SPHERICAL": spherical, "D": 70,
                 "ROWS": kernels._ROWS, "CLUSTERS": kernels._CLUSTERS,
                 "KEYS": kernels._KEYS, "SIZE": kernels._TREE, "BLOCK": seeding._BLOCK,
                 "ELEMENTS": seeding._ELEMENTS,
                 "SUMS": seeding._ROWS if name == "_take" else seeding._SUMS, "CANDIDATES": 8}
    types = {"x": x, "centers": centers, "values": "*i16", "ended": "*i1", "k": "i32", "count": "*i64",
             **{n: "*fp64" for n in DOUBLES},
             **{n: "*i64" for n in WHOLE}}
    if hasattr(seeding, name):
        types |= {n: "i32" for n in ("round", "restart", "purpose", "blocks", "first", "count")}
    for architecture in (80, 90, 100):
        ptx = build(kernel, architecture, constants, types, enable_fp_fusion=False).asm["ptx"]
        report.append({"kernel": name, "spherical": spherical, "architecture": architecture,
                       "fused": ptx.count("fma.rn.f64"),
                       "roots": ptx.count("sqrt.rn.f64"), "divisions": ptx.count("div.rn.f64")})
print(json.dumps(report))
"""


@pytest.mark.slow
def test_compiles_to_arithmetic_that_rounds_like_the_cpu(tmp_path):
    report = ahead.report(COMPILE, tmp_path)
    assert {row["architecture"] for row in report} == {80, 90, 100}
    for row in report:
        assert row["fused"] == 0, row
        if row["kernel"] == "_move":
            assert row["divisions"] > 0, row
            assert (row["roots"] > 0) == row["spherical"], row
