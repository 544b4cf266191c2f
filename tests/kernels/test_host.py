"""The NumPy front end: the same kernels without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import uefl_kernels.numpy
from uefl_kernels import vq_assign

_host = pytest.importorskip("uefl_kernels._host", reason="the compiled kernels are absent")


def array(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("codebook_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_the_op(dtype, codebook_dtype, metric):
    for codebook in (
        array(33, 7, seed=1, dtype=codebook_dtype),
        array(3, 33, 7, seed=1, dtype=codebook_dtype),
    ):
        x = array(9, 50, 21, dtype=dtype)
        indices = _host.vq_assign(x, codebook, metric=metric)
        assert indices.dtype == np.int64
        assert np.array_equal(
            indices, vq_assign(torch.from_numpy(x), torch.from_numpy(codebook), metric=metric).numpy()
        )


VIEWS = {
    "transposed": lambda: array(12, 40).T,
    "reversed": lambda: array(40, 12)[::-1, ::-1],
    "sliced": lambda: array(80, 30)[::2, 3:27:2],
    "fortran": lambda: np.asfortranarray(array(5, 8, 12)),
    "broadcast": lambda: np.broadcast_to(array(12), (40, 12)),
    "three-strided-dimensions": lambda: array(4, 6, 8, 12)[::2, ::3, ::2],
    "field-of-a-record": lambda: np.zeros(40, dtype=[("flag", "i1"), ("x", "f4", 12)])["x"] + 0,
    "unaligned": lambda: (
        np.frombuffer(b"\0" + array(40, 12).tobytes(), np.uint8)[1:].view(np.float32).reshape(40, 12)
    ),
    "unaligned-field": lambda: np.ones(40, dtype=[("flag", "i1"), ("x", "f4", 12)])["x"],
    "one-dimension": lambda: array(12),
    "no-rows": lambda: array(0, 12),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides(view):
    x, codebook = VIEWS[view](), array(19, 4, seed=1)
    dense = np.array(x, order="C", copy=True)
    assert np.array_equal(_host.vq_assign(x, codebook), _host.vq_assign(dense, codebook))
    assert np.array_equal(
        _host.vq_assign(dense, codebook),
        vq_assign(torch.from_numpy(dense), torch.from_numpy(codebook)).numpy(),
    )
    unaligned = (
        np.frombuffer(b"\0" + codebook.tobytes(), np.uint8)[1:].view(np.float32).reshape(codebook.shape)
    )
    for other in (np.asfortranarray(codebook), unaligned):
        assert np.array_equal(_host.vq_assign(dense, other), _host.vq_assign(dense, codebook))


def test_many_rows_on_several_threads():
    x, codebook = array(60000, 16), array(64, 16, seed=1)
    assert np.array_equal(
        _host.vq_assign(x, codebook), vq_assign(torch.from_numpy(x), torch.from_numpy(codebook)).numpy()
    )


@pytest.mark.parametrize("threads", [1, 2, 100])
def test_number_of_threads_does_not_matter(threads):
    x, codebook = array(60000, 16), array(64, 16, seed=1)
    assert np.array_equal(_host.vq_assign(x, codebook, threads=threads), _host.vq_assign(x, codebook))


ALONE = """
import os, threading, numpy as np
from uefl_kernels import _host
x = np.ones((400000, 64), np.float32)
codebook = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
before, most = len(os.listdir("/proc/self/task")), 0
search = threading.Thread(target=lambda: _host.vq_assign(x, codebook, threads=1))
search.start()
while search.is_alive():
    most = max(most, len(os.listdir("/proc/self/task")) - before)
print(most)
"""


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task") or os.cpu_count() == 1, reason="needs Linux and two cores"
)
def test_one_thread_starts_no_other():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1  # the calling thread


X, C = array(4, 6), array(5, 3)
ERRORS = {
    "x-dtype": ((X.astype(np.int32), C), TypeError, "x .*int32.*float32.*float64"),
    "x-byte-order": ((X.astype(">f4"), C), TypeError, "x .*>f4.*float32.*float64"),
    "codebook-dtype": ((X, C.astype(np.float16)), TypeError, "codebook.*float16.*float32.*float64"),
    "metric": ((X, C, "l1"), ValueError, "metric 'l1'.*l2"),
    "scalar": ((np.array(1, np.float32), C), ValueError, r"x.*\[..., D\].*scalar"),
    "codebook-shape": ((X, C[0]), ValueError, r"codebook.*\[K, d\].*\[S, K, d\].*\[3\]"),
    "codebook-empty": ((X, C[:0]), ValueError, r"codebook \[0, 3\].*empty"),
    "length": ((X[:, :5], C), ValueError, r"x \[4, 5\].*codebook \[5, 3\].*multiple.*3"),
    "segments": ((X, np.ones((3, 5, 3), np.float32)), ValueError, r"x \[4, 6\].*codebook \[3, 5, 3\].*9"),
    "threads": ((X, C, "l2", True, 0), ValueError, "threads.*None.*0"),
    "not-finite": ((X, np.full((5, 3), np.nan)), RuntimeError, ".*codebook.*NaN"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, error, message = ERRORS[case]
    with pytest.raises(error, match=f"^vq_assign: {message}"):
        _host.vq_assign(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([[1.0]], C), "x .*NumPy.*list"), ((X, torch.from_numpy(C)), "codebook.*NumPy.*Tensor")],
    ids=["list", "tensor"],
)
def test_other_objects_are_refused(arguments, message):
    with pytest.raises(TypeError, match=f"^vq_assign: {message}"):
        uefl_kernels.numpy.vq_assign(*arguments)


def test_words_that_are_not_known():
    for name, word in (("metric", None), ("metric", C[0]), ("precision", 1)):
        with pytest.raises(ValueError, match=f"^vq_assign: {name} .*expected"):
            uefl_kernels.numpy.vq_assign(X, C, **{name: word})


def test_plan_and_features():
    plan, large = _host.plan(n=100_000, d=64, k=256), _host.plan(n=1000, d=512, k=256)
    assert plan["variant"] == _host.variant()
    integers = "16-bit integers, then float32"
    of_small = {"amx": {"three bfloat16 products"}, "avx512": {"float32"}, "avx2": {integers, "float32"}}
    of_large = {"amx": "one bfloat16 product, then three bfloat16 products", "avx512": "float32"}
    assert plan["arithmetic"] in of_small.get(plan["variant"], {integers})  # avx2: Zen 1 begins in float32
    assert large["arithmetic"] == of_large.get(plan["variant"], integers)
    assert plan["blocks"] * plan["block_rows"] >= 100_000
    assert _host.plan(0, 1, 1)["blocks"] == 0
    assert _host.plan(1, 1, 1)["threads"] == 1
    assert all(isinstance(present, bool) for present in _host.cpu_features().values())
    with pytest.raises(ValueError, match=r"^plan: n .*0"):
        _host.plan(1, 0, 1)


def variant(
    name: str | None, asked: str = "_host.variant()", **more: str
) -> subprocess.CompletedProcess[str]:
    code = f"from uefl_kernels import _host; print({asked})"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("UEFL_CPU")}
    environment = kept | ({} if name is None else {"UEFL_CPU": name}) | more
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_variant_is_forced_by_the_environment():
    assert variant("portable").stdout.strip() == "portable"
    # for this small shape, the plan has a simpler variant than AMX or AVX512-VNNI
    best, asked = variant(None).stdout.strip(), "_host.plan(10, 3, 2)"
    unset, empty, named = (variant(name, asked) for name in (None, "", best))
    assert unset.stdout == empty.stdout == named.stdout != "", named.stderr
    always = variant(best, asked, UEFL_CPU_EVERY_SHAPE="1")
    assert f"'variant': '{best}'" in always.stdout, always.stderr
    result = variant("sse9")
    assert result.returncode != 0
    assert re.search(r"UEFL_CPU=sse9 .*\bamx, avx512vnni, avx512, avx2\b.* portable", result.stderr)
