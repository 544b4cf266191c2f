"""Fixtures for data.

They make small image folders, .npz files and IDX files, and find the real data sets where these are present.

Every test begins with the same seeds and the same number of threads, whatever ran before it. A fixture of a
module is made before the seeds are set, so it must seed its own draws. This file imports Triton before all
tests, because Triton decides at its import whether its kernels are interpreted.
"""

import os

# before torch; threads that spin while they wait multiply the time of a busy machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# processes that share the cores: each has its part of them, in its child processes, too
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
    )

import atexit
import gc
import importlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# Inductor writes C++ without vectors, in every process: to find out which ones the CPU has takes it longer
# than most tests. Its answer stays for the life of a process, and its cache does not tell code by it: a
# process that knows no vectors could find code that has them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# one for all processes of a run, which begins with nothing that another run has left
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="uefl-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import numpy as np
import pytest
import torch
from PIL import Image

from tests.files import write_idx, write_pickle
from tests.interpreter import patch_once_a_launch
from uefl_kernels._library import triton_available

# A shell's background job ignores Ctrl-C, and so would the runs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are collected: it walks a million objects that stay, again and again

# with a GPU, tests/kernels/test_cuda.py runs the kernels natively
if triton_available() and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        for op in ("kmeans", "kmeans_step", "mc_dropout_mlp", "vq_assign", "vq_backward", "vq.forward"):
            importlib.import_module(f"uefl_kernels.ops.{op}.triton")

        patch_once_a_launch()

THREADS = torch.get_num_threads()  # before any test


def pytest_collection_finish():
    """Start the process that some tests fork from, before the package is imported.

    Also leave modules and tests out of garbage collections.
    """
    if "tests.fresh" in sys.modules:
        sys.modules["tests.fresh"].start()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _whatever_ran_before():
    """Make unseeded draws equal in every selection and order of tests, and restore the number of threads."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # some libraries draw from it
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def published_wheel(tmp_path_factory):
    """Build the wheel once as ``make wheel`` does.

    With nvcc the wheel has CUDA kernels for one architecture.
    """
    pytest.importorskip("auditwheel")
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | {"CMAKE_ARGS": "-DUEFL_CUDA=AUTO -DCMAKE_CUDA_ARCHITECTURES=80-real"}
    subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "tools" / "wheel.py", "build", folder],
        check=True,
        env=environment,
    )
    return next(folder.glob("*.whl"))


@pytest.fixture
def data_root():
    """Return the folder of the real data sets."""
    root = os.environ.get("UEFL_DATA")
    if not root:
        pytest.skip("UEFL_DATA does not name a folder of data sets")
    return Path(root)


@pytest.fixture
def make_images(tmp_path):
    """Write random images of a PIL mode to folders of tmp_path/silos, and return tmp_path/silos.

    The pixels of a folder depend only on its name.
    """

    def make(*folders, count=5, size=(8, 6), mode="L"):
        shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 3)
        for folder in folders:
            path = tmp_path / "silos" / folder
            path.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng(list(folder.encode()))
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path / f"{i}.png")
        return tmp_path / "silos"

    return make


@pytest.fixture
def make_npz(tmp_path):
    """Write arrays to an .npz.

    Without arrays, write 40 images of 6x6 pixels and 4 classes, of the clients north and south.
    """

    def make(**arrays):
        rng = np.random.default_rng(0)
        own = {
            "images": rng.integers(0, 256, (40, 6, 6), dtype=np.uint8),
            "labels": np.arange(40) % 4,
            "silo": np.repeat(["south", "north"], 20),
        }
        path = tmp_path / "data.npz"
        np.savez(path, **{name: array for name, array in {**own, **arrays}.items() if array is not None})
        return path

    return make


@pytest.fixture
def idx_root(tmp_path):
    """Return a data root with MNIST as torchvision stores it: 40 training and 20 test images."""
    write_idx(tmp_path / "root" / "MNIST" / "raw", ("train", "t10k"), (40, 20))
    return tmp_path / "root"


@pytest.fixture
def cifar_root(tmp_path, monkeypatch):
    """Return a data root with CIFAR-10 as torchvision stores it: 200 training and 40 test images."""
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "root" / CIFAR10.base_folder
    folder.mkdir(parents=True)

    def batch(name, start):
        pixels = np.random.default_rng(start).integers(0, 256, (40, 3 * 32 * 32), dtype=np.uint8)
        labels = [i % 10 for i in range(start, start + 40)]
        return [name, write_pickle(folder / name, {"data": pixels, "labels": labels})]

    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    meta = CIFAR10.meta | {"md5": write_pickle(folder / CIFAR10.meta["filename"], {"label_names": names})}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    monkeypatch.setattr(CIFAR10, "train_list", [batch(f"data_batch_{i}", 100 * i + i) for i in range(1, 6)])
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch", 0)])
    return tmp_path / "root"
